"""Blow to a run in the middle of an evaluation, or of a long hook of its own."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import Request, file_request


@dataclass
class StrikingKeys(CallbackConfig):
    """Keys of the callback."""

    blow: str = option("", "Name of the blow; empty for none.")
    at_pass: int = option(2, "Forward pass in evaluations that is struck, from 1.", minimum=1)
    at_step: int | None = option(None, "Step whose own hook is struck instead.")
    on_rank: int = option(0, "Rank that is struck.", minimum=0)


class Striking(Callback):
    """Asks the run to stop, fails or kills its rank, once in each process."""

    def __init__(self, keys: StrikingKeys) -> None:
        self._keys, self._passes = keys, 0

    def on_train_start(self, context: Context) -> None:
        self._run = RunPaths(context.folder.parents[1])
        if self._keys.blow and context.rank == self._keys.on_rank and self._keys.at_step is None:
            context.module.register_forward_pre_hook(self._count)

    def after_step(self, context: Context) -> None:
        if context.step == self._keys.at_step:
            if self._keys.blow and context.rank == self._keys.on_rank:
                self._strike()
            if context.should_stop():
                return
        context.record("worked", step=context.step, loss=context.loss)

    def _count(self, module: Any, inputs: Any) -> None:
        import torch

        self._passes += not torch.is_grad_enabled()
        if self._passes == self._keys.at_pass:
            self._passes += 1
            self._strike()

    def _strike(self) -> None:
        match self._keys.blow:
            case "stop":
                file_request(self._run, Request.stop)
            case "raise":
                raise MemoryError("no memory for the logits")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)


SPEC = CallbackSpec(name="striking", keys=StrikingKeys, build=Striking)
