"""Rules about activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator
from trainctl.errors import Finding
from trainctl.options.activation_checkpointing import recomputed
from trainctl.rules.plan.draft import Draft, error, warning


def some_block_is_recomputed(draft: Draft) -> Iterator[Finding]:
    """Recomputation that reaches no block, or not the k-th, was meant otherwise."""
    config = draft.config
    settings, layers = recomputed(config), config.model.num_layers
    if settings is None:
        return
    if layers == 0:
        yield error(
            "activation_checkpointing.mode",
            f"activation_checkpointing.mode={settings.mode} recomputes 0 blocks: "
            "model.num_layers=0",
            "activation_checkpointing=none, or model.num_layers=1 or more",
        )
    elif settings.every_kth_block > layers:
        yield error(
            "activation_checkpointing.every_kth_block",
            f"activation_checkpointing.every_kth_block={settings.every_kth_block}, but the model "
            f"has {layers} blocks",
            f"activation_checkpointing.every_kth_block={layers} or less",
        )


def partitioned_inputs_are_copies(draft: Draft) -> Iterator[Finding]:
    """A slice of the input suffices where the other tensor-parallel ranks have the same input."""
    settings, axes = recomputed(draft.config), draft.config.parallelism
    key = "activation_checkpointing.partition_across_tensor_ranks"
    if settings is None or not settings.partition_across_tensor_ranks:
        return
    if axes.tensor == 1:
        yield error(
            key,
            f"{key} has nothing to partition over: parallelism.tensor=1",
            f"parallelism.tensor=2 or more, or {key}=false",
        )
    elif axes.sequence_sharded_norms:
        yield error(
            key,
            f"{key} with parallelism.sequence_sharded_norms: a rank's input is a slice already",
            f"{key}=false",
        )


def offloaded_inputs_leave_the_device(draft: Draft) -> Iterator[Finding]:
    """On a CPU the device's memory is the host's."""
    settings = recomputed(draft.config)
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if settings is not None and settings.offload_to_cpu and on_cpu:
        key = "activation_checkpointing.offload_to_cpu"
        yield warning(
            key,
            f"{key}=true has no effect: on cpu the inputs are in host memory already",
            f"leave {key} out",
        )
