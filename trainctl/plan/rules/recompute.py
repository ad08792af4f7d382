"""Rules about activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, CheckpointingMode
from trainctl.errors import Finding
from trainctl.plan.rules.draft import Draft, error, warning

INPUT_KEYS = ("offload_to_cpu", "partition_across_tensor_ranks")
"""Keys about the inputs of recomputed blocks."""


def some_block_is_recomputed(draft: Draft) -> Iterator[Finding]:
    """Recomputation that reaches no block, or not the k-th, was meant otherwise."""
    config = draft.config
    settings, layers = config.activation_checkpointing, config.model.num_layers
    if settings.mode is CheckpointingMode.none:
        return
    if layers == 0:
        yield error(
            "activation_checkpointing.mode",
            f"activation_checkpointing.mode={settings.mode.value} recomputes 0 blocks: "
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


def inputs_belong_to_recomputed_blocks(draft: Draft) -> Iterator[Finding]:
    """Without recomputation a block's input is one of many tensors that are kept."""
    settings = draft.config.activation_checkpointing
    if settings.mode is not CheckpointingMode.none:
        return
    for name in INPUT_KEYS:
        if getattr(settings, name):
            yield error(
                f"activation_checkpointing.{name}",
                f"activation_checkpointing.{name} is about the inputs of recomputed blocks, and "
                "activation_checkpointing.mode=none recomputes none",
                f"activation_checkpointing=full, or activation_checkpointing.{name}=false",
            )


def partitioned_inputs_are_copies(draft: Draft) -> Iterator[Finding]:
    """A slice of the input suffices where the other tensor-parallel ranks have the same input."""
    axes = draft.config.parallelism
    key = "activation_checkpointing.partition_across_tensor_ranks"
    if not draft.config.activation_checkpointing.partition_across_tensor_ranks:
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
    settings = draft.config.activation_checkpointing
    if settings.offload_to_cpu and draft.hardware.accelerator is Accelerator.cpu:
        key = "activation_checkpointing.offload_to_cpu"
        yield warning(
            key,
            f"{key}=true has no effect: on cpu the inputs are in host memory already",
            f"leave {key} out",
        )
