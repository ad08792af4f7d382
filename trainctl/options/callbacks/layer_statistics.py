"""Statistics of each layer, every few steps."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import CompileKind
from trainctl.config.schema.option import option
from trainctl.options.callbacks import CallbackConfig, CallbackSpec
from trainctl.options.limits import only_value


@dataclass
class LayerStatisticsConfig(CallbackConfig):
    """Keys of the callback `layer_statistics`."""

    every_steps: int = option(
        50, "Interval of the measured steps.", unit="optimizer steps", minimum=1
    )
    dead_below: float = option(
        1e-6,
        "Largest absolute activation of a unit that is dead: an input of the feed-forward layer's "
        "output projection that no token of the step exceeds. Units after ReLU die at exactly 0; "
        "gated units are seldom that small.",
        minimum=0.0,
    )


SPEC = CallbackSpec(
    name="layer_statistics",
    keys=LayerStatisticsConfig,
    build="trainctl.train.callbacks.layer_statistics:LayerStatistics",
    collectives=True,
    host_bytes=4,  # the weights before the update, in fp32
    limits=(
        only_value("parallelism.pipeline", 1, "reads activations, which no rank has of all layers"),
        only_value(
            "kernels.compile", CompileKind.none, "reads activations, which compiled code hides"
        ),
    ),
)
