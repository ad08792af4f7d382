"""What a config asks for that training does not do yet, although it plans and budgets it."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    CheckpointingMode,
    DataType,
    LauncherKind,
    OffloadDevice,
    OnBadLoss,
    OptimizerKind,
    RunConfig,
    ScheduleKind,
)
from trainctl.plan.precision import formats

TRAINABLE_OPTIMIZERS = (OptimizerKind.adamw,)
TRAINABLE_SCHEDULES = (ScheduleKind.constant, ScheduleKind.linear, ScheduleKind.cosine)
TRAINABLE_COMPUTE = (DataType.fp32, DataType.bf16)
TRAINABLE_CHECKPOINTING = (CheckpointingMode.none, CheckpointingMode.full)


def not_yet(config: RunConfig) -> tuple[str, ...]:
    """One sentence for each technique that `launch` has to refuse today; it names the key."""
    return tuple(
        f"{key}={value}: training with {technique} is not there yet"
        for key, value, technique in _wanted(config)
    )


def _wanted(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    """Key, value and name of each technique that the config uses and training lacks."""
    if not config.trains_itself:
        yield from _launching(config)
        return
    yield from _model_and_optimizer(config)
    yield from _layout(config)
    yield from _precision(config)
    yield from _run(config)


def _model_and_optimizer(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    if config.model.mup:
        yield "model.mup", "true", "maximal-update parametrisation"
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", "true", "a model's own code"
    if config.optimizer.kind not in TRAINABLE_OPTIMIZERS:
        name = config.optimizer.kind.value
        yield "optimizer.kind", name, f"the {name} optimizer"
    if config.schedule.kind not in TRAINABLE_SCHEDULES:
        name = config.schedule.kind.value
        yield "schedule.kind", name, f"the {name} schedule"


def _layout(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    zero, offload, parallelism = config.zero_stage, config.offload, config.parallelism
    if zero.hpz_partition_size > 1:
        yield "zero_stage.hpz_partition_size", zero.hpz_partition_size, "ZeRO++ hpZ"
    if zero.quantized_weights:
        yield "zero_stage.quantized_weights", "true", "ZeRO++ qwZ"
    if zero.quantized_gradients:
        yield "zero_stage.quantized_gradients", "true", "ZeRO++ qgZ"
    if offload.optimizer is not OffloadDevice.none and offload.ratio < 1:
        yield "offload.ratio", offload.ratio, "a part of the optimizer on the device"
    if offload.zenflow:
        yield "offload.zenflow", "true", "ZenFlow"
    if offload.super_offload:
        yield "offload.super_offload", "true", "SuperOffload"
    for axis in ("tensor", "pipeline", "sequence", "expert"):
        size = getattr(parallelism, axis)
        if size > 1:
            yield f"parallelism.{axis}", size, f"{axis} parallelism"


def _precision(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    precision = config.precision
    used = formats(precision)
    if precision.compute not in TRAINABLE_COMPUTE:
        yield "precision.compute", precision.compute.value, precision.compute.value
    if precision.autocast:
        yield "precision.autocast", "true", "autocast"
    for name in ("master_weights", "optimizer_states"):
        kept_in = getattr(precision, name)
        if kept_in is not DataType.fp32:
            what = name.replace("_", " ")
            yield f"precision.{name}", kept_in.value, f"{what} in {kept_in.value}"
    for name in ("gradient_accumulation", "communication"):
        kept_in = getattr(used, name)
        if kept_in is not used.weights:
            what = name.replace("_", " ")
            yield f"precision.{name}", kept_in.value, f"{what} in another format than the weights"


def _run(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    recompute, stability = config.activation_checkpointing, config.stability
    if recompute.mode not in TRAINABLE_CHECKPOINTING:
        name = recompute.mode.value
        yield "activation_checkpointing.mode", name, f"{name} activation checkpointing"
    if recompute.offload_to_cpu:
        yield "activation_checkpointing.offload_to_cpu", "true", "block inputs in host memory"
    if recompute.partition_across_tensor_ranks:
        key = "activation_checkpointing.partition_across_tensor_ranks"
        yield key, "true", "partitioned block inputs"
    if stability.on_bad_loss is not OnBadLoss.stop:
        name = stability.on_bad_loss.value
        yield "stability.on_bad_loss", name, f"{name} after a bad loss"
    if stability.spike_factor is not None:
        yield "stability.spike_factor", stability.spike_factor, "detection of loss spikes"
    if stability.z_loss > 0:
        yield "stability.z_loss", stability.z_loss, "z-loss"
    if config.logging.profile_steps:
        yield "logging.profile_steps", config.logging.profile_steps, "the profiler"
    yield from _launching(config)


def _launching(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    if config.launcher.kind is not LauncherKind.local:
        name = config.launcher.kind.value
        yield "launcher.kind", name, f"the {name} launcher"
    if config.hardware.nodes > 1:
        yield "hardware.nodes", config.hardware.nodes, "more than one node"
