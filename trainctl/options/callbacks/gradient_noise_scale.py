"""Gradient noise scale: the batch size above which more samples a step help little."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import CompileKind
from trainctl.config.schema.option import option
from trainctl.options.callbacks import CallbackConfig, CallbackSpec
from trainctl.options.limits import never_value, only_value

_HIDDEN = "needs the gradient norm before the update"
_PARTS = "compares whole gradients of micro-batches"


@dataclass
class GradientNoiseScaleConfig(CallbackConfig):
    """Keys of the callback `gradient_noise_scale`."""

    every_steps: int = option(
        10, "Interval of the measured steps.", unit="optimizer steps", minimum=1
    )
    decay: float = option(
        0.95,
        "Decay of the moving averages of both estimates, for each measured step.",
        minimum=0.0,
        maximum=0.9999,
    )


SPEC = CallbackSpec(
    name="gradient_noise_scale",
    keys=GradientNoiseScaleConfig,
    build="trainctl.train.callbacks.gradient_noise_scale:GradientNoiseScale",
    collectives=True,
    min_micro_batches=2,
    limits=(
        *(
            only_value(f"parallelism.{axis}", 1, _PARTS)
            for axis in ("tensor", "pipeline", "sequence", "context", "expert")
        ),
        only_value("engine.kind", "deepspeed", "reads gradients before they are summed over ranks"),
        only_value(
            "kernels.compile", CompileKind.none, "reads gradients, which compiled code hides"
        ),
        never_value("offload.super_offload", True, _HIDDEN, "offload.super_offload=false"),
        only_value("offload.zenflow", False, _HIDDEN),
    ),
)
