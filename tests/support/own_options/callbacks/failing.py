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
    return {
        "raises": Raises,
        "collects": Collects,
        "agrees": Agrees,
        "typo": Typo,
        "closes": Closes,
        "saves": Saves,
        "records": Records,
        "raises and closes": RaisesAndCloses,
    }[keys.wrong]()


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


class Closes(Callback):
    def close(self) -> None:
        raise ValueError("it is shut")


class RaisesAndCloses(Raises, Closes):
    pass


class Saves(Callback):
    def before_save(self) -> dict[str, float]:
        return {"best": float("inf")}


class Records(Callback):
    def after_backward(self, context: Context) -> None:
        context.record("position", value=1j)


SPEC = CallbackSpec(
    name="failing",
    keys=FailingConfig,
    build=build,
    ranks=Ranks.first,
)
