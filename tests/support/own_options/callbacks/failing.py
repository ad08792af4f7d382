"""Callbacks that fail in the way that their key says."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context, Ranks


@dataclass
class FailingConfig(CallbackConfig):
    """Keys of the callback `failing`."""

    wrong: str = option("raises", "What it does wrong.")


def build(keys: FailingConfig) -> Callback:
    return {"raises": Raises, "collects": Collects, "agrees": Agrees, "typo": Typo}[keys.wrong]()


class Raises(Callback):
    def after_step(self, context: Context) -> None:
        if context.step == 2:
            raise ValueError("two is too many")


class Collects(Callback):
    def after_step(self, context: Context) -> None:
        context.collectives.sum(1.0)


class Agrees(Callback):
    def before_agreement(self, context: Context) -> list[float]:
        return [1.0]


class Typo(Callback):
    def after_steps(self, context: Context) -> None:
        pass


SPEC = CallbackSpec(
    name="failing",
    keys=FailingConfig,
    build=build,
    ranks=Ranks.first,
)
