"""A running mean of the loss: a callback from outside trainctl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context


@dataclass
class SmoothedConfig(CallbackConfig):
    """Keys of the callback `smoothed`."""

    decay: float = option(0.9, "Decay of the mean.", minimum=0, maximum=0.999)


class Smoothed(Callback):
    """Records the mean after each step; the mean is its state."""

    def __init__(self, keys: SmoothedConfig) -> None:
        self._decay = keys.decay
        self._mean: float | None = None

    def after_step(self, context: Context) -> None:
        assert context.loss is not None
        before = context.loss if self._mean is None else self._mean
        self._mean = self._decay * before + (1 - self._decay) * context.loss
        context.record("smoothed", loss=self._mean)

    def before_save(self) -> Mapping[str, Any]:
        return {"mean": self._mean}

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._mean = state.get("mean")


SPEC = CallbackSpec(name="smoothed", keys=SmoothedConfig, build=Smoothed)
