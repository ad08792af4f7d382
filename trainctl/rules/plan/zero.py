"""Rules about ZeRO stages and offload, as DeepSpeed 0.19 enforces them, or should."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    Accelerator,
    CheckpointConfig,
    DataType,
    OffloadDevice,
)
from trainctl.errors import Finding
from trainctl.options.optimizer import spec_of
from trainctl.plan.precision import formats
from trainctl.rules.deepspeed import offload, zero
from trainctl.rules.plan.draft import Draft, error, on_json
from trainctl.rules.plan.zenflow import zenflow_findings


def shards_clip_by_one_norm(draft: Draft) -> Iterator[Finding]:
    """Without ZeRO DeepSpeed's norm is that of a part, silently; in fp32 the trainer clips instead.

    Each pipeline stage takes its own, and tensor ranks only the first one's shards: what it
    flattens loses the mark of a shard (fp16/unfused_optimizer.py and get_weight_norm). Experts it
    leaves out.
    """
    config, axes = draft.config, draft.config.parallelism
    if config.zero_stage.stage > 0 or formats(config.precision).weights is DataType.fp32:
        return
    for axis, whose in (
        ("pipeline", "each stage's own gradient norm"),
        ("tensor", "the first tensor rank's gradient norm"),
        ("expert", "a gradient norm without experts"),
    ):
        if getattr(axes, axis) > 1:
            yield error(
                "zero_stage.stage",
                f"zero_stage.stage=0 with parallelism.{axis}={getattr(axes, axis)} in "
                f"{config.precision.compute} would clip by {whose}",
                "zero_stage=1",
            )


def offload_has_its_stage(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed ignores offload at a stage that does not know it; only the ratio is refused."""
    yield from on_json(offload.offload_has_its_stage)(draft)
    settings, stage = draft.config.offload, draft.config.zero_stage.stage
    # The JSON has the ratio at stage 3 only.
    if settings.optimizer is not OffloadDevice.none and settings.ratio < 1 and stage < 3:
        yield error(
            "offload.ratio",
            f"offload.ratio={settings.ratio:g} needs ZeRO stage 3, and it is {stage}",
            "offload.ratio=1, or zero_stage=3",
        )


def offloaded_optimizer_has_a_cpu_kernel(draft: Draft) -> Iterator[Finding]:
    """What DeepSpeed can update in host memory, and what it can update in parts."""
    offload, spec = draft.config.offload, spec_of(draft.config.optimizer)
    if offload.optimizer is OffloadDevice.none:
        return
    if not spec.has_cpu_kernel and not draft.config.trains_itself:
        yield error(
            "optimizer.kind",
            f"optimizer.kind={spec.name} has no CPU kernel, and its states are offloaded",
            "optimizer=adamw, or offload=none",
        )
    elif spec.has_cpu_kernel and offload.ratio < 1 and "ratio" not in spec.offload_variants:
        # The part on the device is always torch's AdamW (zero/stage3.py, backup_optimizer).
        yield error(
            "offload.ratio",
            f"offload.ratio={offload.ratio:g} is for adamw, not {spec.name}",
            "offload.ratio=1",
        )


def offload_variants_have_their_base(draft: Draft) -> Iterator[Finding]:
    """ZenFlow and SuperOffload are kinds of optimizer offload, and go with a part of the rest."""
    offload, stage = draft.config.offload, draft.config.zero_stage.stage
    if offload.zenflow and offload.optimizer is not OffloadDevice.cpu:
        yield error(
            "offload.zenflow",
            f"offload.zenflow needs offload.optimizer=cpu, and it is {offload.optimizer.value}",
            "offload.optimizer=cpu",
        )
    yield from zenflow_findings(draft)
    if not offload.super_offload:
        return
    if offload.optimizer is not OffloadDevice.cpu or stage != 3:
        yield error(
            "offload.super_offload",
            "offload.super_offload needs offload.optimizer=cpu and ZeRO stage 3; they are "
            f"{offload.optimizer.value} and {stage}",
            "offload.optimizer=cpu zero_stage=3",
        )
    if draft.hardware.accelerator is not Accelerator.cuda:
        yield error(
            "offload.super_offload",
            f"offload.super_offload is for CUDA, and the hardware is {draft.hardware.name}",
            "offload.super_offload=false",
        )
    # SuperOffload builds a CPUAdam from lr, betas and decay alone (superoffload_utils.py). Without
    # clipping it updates during the backward pass, before gradients are unscaled.
    spec, precision = spec_of(draft.config.optimizer), draft.config.precision
    if "super_offload" not in spec.offload_variants:
        yield error(
            "optimizer.kind",
            f"offload.super_offload updates by AdamW, and optimizer.kind is {spec.name}",
            "optimizer=adamw, or offload.super_offload=false",
        )
    if precision.master_weights is not DataType.fp32:
        yield error(
            "precision.master_weights",
            "offload.super_offload updates fp32 master weights, and they are "
            f"{precision.master_weights.value}",
            "precision.master_weights=fp32",
        )
    if formats(precision).weights is DataType.fp16 and not draft.config.optimizer.gradient_clipping:
        yield error(
            "optimizer.gradient_clipping",
            "offload.super_offload in fp16 without clipping updates by gradients that are still "
            "multiplied by the loss scale",
            "optimizer.gradient_clipping=1.0, or precision=bf16",
        )
    if _saves(draft.config.checkpoint):
        yield error(
            "offload.super_offload",
            "offload.super_offload keeps the moments in a process of its own that gives them to "
            "nobody: a checkpoint would lack them",
            "offload.super_offload=false, or no checkpoints: checkpoint.at_end=false and no "
            "interval",
        )


def _saves(checkpoint: CheckpointConfig) -> bool:
    """Return True if a run saves anything by default."""
    intervals = (
        checkpoint.every_steps,
        checkpoint.every_minutes,
        checkpoint.best_of,
        checkpoint.weights_only_every_steps,
    )
    return checkpoint.at_end or any(interval is not None for interval in intervals)


def secondary_partition_divides(draft: Draft) -> Iterator[Finding]:
    """hpZ groups are equal and lie inside a node (utils/groups.py)."""
    config = draft.config
    size = config.zero_stage.hpz_partition_size
    if config.zero_stage.stage != 3 or size == 1:
        return
    # DeepSpeed takes neighbouring ranks of the world (groups._create_zero_param_parallel_group).
    if config.parallelism.tensor > 1:
        yield error(
            "zero_stage.hpz_partition_size",
            f"zero_stage.hpz_partition_size={size} with parallelism.tensor="
            f"{config.parallelism.tensor}: DeepSpeed would spread a shard over tensor ranks that "
            "hold different ones",
            "zero_stage.hpz_partition_size=1, or parallelism.tensor=1",
        )
    if config.offload.parameters is not OffloadDevice.none:
        yield error(
            "zero_stage.hpz_partition_size",
            f"zero_stage.hpz_partition_size={size} keeps a copy of the parameters near, and "
            "offload.parameters sends them away",
            "zero_stage.hpz_partition_size=1, or offload.parameters=none",
        )
    yield from on_json(zero.secondary_partitions_divide_a_node)(draft)
