"""Moving average of the weights: its decay, and the settings that rule it out. No torch."""

from __future__ import annotations

from trainctl.config.schema import CompileKind, DataType, OffloadDevice, RunConfig

METRIC = "ema_loss"
"""Name of the average's held-out loss, logged beside the held-out loss of the weights."""


def ema_decay(update: int, decay: float) -> float:
    """Return the decay at update t, counted from 1: ``min(decay, (1 + t) / (10 + t))``.

    The average starts as a copy of the first weights. With a constant decay of 0.999 it would still
    hold a third of them after a thousand updates. This ramp forgets them: 2/11 is left after the
    first update, and after t updates at most 10! / ((t + 2) ... (t + 10)). It is the ramp of
    TensorFlow's `ExponentialMovingAverage` with `num_updates`.
    """
    return min(decay, (1 + update) / (10 + update))


def average_conflict(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting that rules out an average, and the reason; None if one can be kept."""
    offload = config.offload
    if offload.zenflow:
        return "offload.zenflow=true", "the master weights lag behind those of the model"
    if offload.super_offload:
        return "offload.super_offload=true", "another process has the master weights"
    if offload.optimizer is OffloadDevice.nvme:
        return "offload.optimizer=nvme", "DeepSpeed's swapper holds the four tensors of Adam"
    if config.precision.master_weights is not DataType.fp32:
        return (
            f"precision.master_weights={config.precision.master_weights.value}",
            "the average is in fp32, and changes places with the master weights to be evaluated",
        )
    if config.kernels.compile is CompileKind.deepcompile:
        return (
            "kernels.compile=deepcompile",
            "the compiled graph keeps gathered weights, which would not follow an evaluation",
        )
    return None
