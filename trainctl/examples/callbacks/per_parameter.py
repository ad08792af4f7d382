"""Gradient norm of each parameter, every few steps."""

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context


@dataclass
class PerParameterKeys(CallbackConfig):
    """Keys of the callback."""

    every_steps: int = option(10, "Interval.", unit="optimizer steps", minimum=1)


class PerParameterCallback(Callback):
    """Records the norms, which are sums over all ranks."""

    def __init__(self, keys: PerParameterKeys) -> None:
        self.keys = keys

    def after_backward(self, context: Context) -> None:
        if context.step % self.keys.every_steps == 0:
            squares = dict.fromkeys(context.shapes, 0.0)
            for part in context.gradients():
                if part.is_counted:
                    squares[part.name] += float(part.values.double().square().sum())
            sums = context.collectives.sum(*squares.values())
            norms = {name: total**0.5 for name, total in zip(squares, sums, strict=True)}
            context.record("gradient_norm", **norms)


SPEC = CallbackSpec(
    name="per_parameter", keys=PerParameterKeys, build=PerParameterCallback, collectives=True
)
