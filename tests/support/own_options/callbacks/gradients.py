"""Callback that writes the whole gradients of the first step, and checks their fragments."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context


@dataclass
class GradientsConfig(CallbackConfig):
    """Keys of the callback `gradients`."""

    every_steps: int = option(1, "Interval.", unit="optimizer steps", minimum=1)


class Gradients(Callback):
    """Compares sums over parts with the gradient norm; writes `RUN/callbacks/gradients/1.pt`."""

    def __init__(self, keys: GradientsConfig) -> None:
        self._keys = keys

    def after_backward(self, context: Context) -> None:
        import torch

        assert context.has_gradients
        squares = dict.fromkeys(context.shapes, 0.0)
        for part in context.gradients():
            if part.is_counted:
                squares[part.name] += float(part.values.double().square().sum())
        squares = dict(
            zip(squares, context.collectives.sum(*squares.values()), strict=True),
        )
        context.record("squares", **squares)
        if context.step == 1:
            both = {
                "gradients": {n: context.collectives.whole_gradient(n) for n in context.shapes},
                "weights": {n: context.collectives.whole_weight(n) for n in context.shapes},
            }
            if context.rank == 0:
                context.folder.mkdir(parents=True)
                torch.save(both, context.folder / "1.pt")


SPEC = CallbackSpec(
    name="gradients",
    keys=GradientsConfig,
    build=Gradients,
    collectives=True,
)
