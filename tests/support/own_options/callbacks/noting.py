"""Callback that records every hook of a rank, and keeps a state of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context


@dataclass
class NotingConfig(CallbackConfig):
    """Keys of the callback `noting`."""

    save_at: int | None = option(None, "Step after which rank 1 asks for a checkpoint.")
    stop_at: int | None = option(None, "Step after which rank 1 asks to stop.")
    uneven_from: int | None = option(
        None, "Step from which there is one number more to sum; at step 1, of rank 1 alone."
    )
    stop_in_agreement: int | None = option(None, "The same, asked in before_agreement.")


class Noting(Callback):
    """Adds the hooks to `RUN/callbacks/noting/RANK.jsonl`."""

    def __init__(self, keys: NotingConfig) -> None:
        self._keys = keys
        self._mean = 0.0
        self._summed = 0.0
        self._context: Context | None = None

    def on_train_start(self, context: Context) -> None:
        context.folder.mkdir(parents=True, exist_ok=True)
        self._context = context
        self._note("on_train_start")

    def before_step(self, context: Context) -> None:
        self._note("before_step")

    def after_backward(self, context: Context) -> None:
        assert context.loss is not None and context.grad_norm is not None
        self._note("after_backward")

    def after_step(self, context: Context) -> None:
        assert context.loss is not None
        self._mean = 0.9 * self._mean + 0.1 * context.loss
        context.record("mean", value=self._mean, summed=self._summed)
        self._note("after_step")
        if context.rank == 1 and context.step == self._keys.save_at:
            context.request_save()
        if context.rank == 1 and context.step == self._keys.stop_at:
            context.request_stop("enough")

    def on_evaluate(self, context: Context) -> None:
        self._note(f"on_evaluate {sorted(context.metrics)}")

    def before_agreement(self, context: Context) -> Sequence[float]:
        if context.rank == 1 and context.step == self._keys.stop_in_agreement:
            context.request_stop("enough")
        uneven = self._keys.uneven_from
        is_uneven = uneven is not None and context.step >= uneven
        # A rank whose peer has raised may report the lost connection, so later on both raise.
        more = [0.0] if is_uneven and (context.rank == 1 or context.step > 1) else []
        return [1.0 + context.rank, context.step, *more]

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        assert sums == [3.0, 2 * context.step]
        self._summed += sums[0]
        self._note("after_agreement")

    def before_save(self) -> Mapping[str, Any]:
        self._note("before_save")
        return {"mean": self._mean, "summed": self._summed}

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._mean, self._summed = state["mean"], state["summed"]
        self._note(f"after_load {self._summed}")

    def on_train_end(self, context: Context) -> None:
        self._note("on_train_end")

    def _note(self, hook: str) -> None:
        if self._context is not None:
            path = self._context.folder / f"{self._context.rank}.jsonl"
            with path.open("a") as stream:
                stream.write(json.dumps([self._context.step, hook]) + "\n")


SPEC = CallbackSpec(name="noting", keys=NotingConfig, build=Noting)
