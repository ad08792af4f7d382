"""The moving average of the weights: how fast it moves, and where it cannot be kept. No torch."""

from __future__ import annotations

from trainctl.config.schema import CompileKind, DataType, OffloadDevice, RunConfig

METRIC = "ema_loss"
"""Held-out loss of the average, beside that of the weights."""


def decay_of(update: int, decay: float) -> float:
    """What an update leaves of the average: ``min(decay, (1 + t) / (10 + t))`` at update t, from 1.

    It begins as a copy of the first weights, which a constant decay of 0.999 would still hold a
    third of after a thousand updates. This one forgets them: 2/11 is left at the first update, and
    after t updates at most 10! / ((t + 2) ... (t + 10)) of them. (The ramp of TensorFlow's
    `ExponentialMovingAverage` with `num_updates`.)
    """
    return min(decay, (1 + update) / (10 + update))


def why_not(config: RunConfig) -> tuple[str, str] | None:
    """Return the setting under which no average can be kept, and why; None if it can."""
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
