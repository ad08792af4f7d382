"""Rules about activation checkpointing."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator
from trainctl.options.activation_checkpointing import recomputed
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule


@rule(
    "TC081",
    "activation_checkpointing.mode",
    "activation_checkpointing.every_kth_block",
    example="recipe=tiny activation_checkpointing=full activation_checkpointing.every_kth_block=5",
)
def some_block_is_recomputed(draft: Draft) -> Iterator[Problem]:
    """Activation checkpointing recomputes at least one block.

    Recomputation works on whole blocks, every k-th of them. One that reaches none saves nothing.

    Fix: Set every_kth_block to at most the number of blocks.
    """
    config = draft.config
    settings, layers = recomputed(config), config.model.num_layers
    if settings is None:
        return
    if layers == 0:
        yield Problem(
            f"activation_checkpointing.mode={settings.mode} recomputes 0 blocks: "
            "model.num_layers=0",
            "activation_checkpointing=none, or model.num_layers=1 or more",
        )
    elif settings.every_kth_block > layers:
        yield Problem(
            f"activation_checkpointing.every_kth_block={settings.every_kth_block}, but the model "
            f"has {layers} blocks",
            f"activation_checkpointing.every_kth_block={layers} or less",
            key="activation_checkpointing.every_kth_block",
        )


@rule(
    "TC083",
    "activation_checkpointing.partition_across_tensor_ranks",
    example="recipe=tiny activation_checkpointing=full "
    "activation_checkpointing.partition_across_tensor_ranks=true",
)
def partitioned_inputs_are_copies(draft: Draft) -> Iterator[Problem]:
    """Checkpointed inputs are partitioned only where tensor-parallel ranks hold copies of them.

    With tensor parallelism all ranks of a group keep the same input of a block; a slice on each
    suffices. Alone, or with norms that are sharded already, there is nothing to slice.

    Fix: Use parallelism.tensor above 1, or leave it out.
    """
    settings, axes = recomputed(draft.config), draft.config.parallelism
    key = "activation_checkpointing.partition_across_tensor_ranks"
    if settings is None or not settings.partition_across_tensor_ranks:
        return
    if axes.tensor == 1:
        yield Problem(
            f"{key} has nothing to partition over: parallelism.tensor=1",
            f"parallelism.tensor=2 or more, or {key}=false",
        )
    elif axes.sequence_sharded_norms:
        yield Problem(
            f"{key} with parallelism.sequence_sharded_norms: a rank's input is a slice already",
            f"{key}=false",
        )


@rule(
    "TC084",
    "activation_checkpointing.offload_to_cpu",
    severity=WARNING,
    example="recipe=tiny activation_checkpointing=full "
    "activation_checkpointing.offload_to_cpu=true",
)
def offloaded_inputs_leave_the_device(draft: Draft) -> Iterator[Problem]:
    """Checkpointed inputs are offloaded from a device with memory of its own.

    Inputs of blocks are copied from the device to the host and back. On a CPU both are the same
    memory.

    Fix: Leave it out on CPUs.
    """
    settings = recomputed(draft.config)
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if settings is not None and settings.offload_to_cpu and on_cpu:
        key = "activation_checkpointing.offload_to_cpu"
        yield Problem(
            f"{key}=true has no effect: on cpu the inputs are in host memory already",
            f"leave {key} out",
        )
