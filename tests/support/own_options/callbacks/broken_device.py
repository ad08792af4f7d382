"""A device that computes wrongly: bits are flipped in the memory or the results of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.callbacks import Callback, CallbackConfig, CallbackSpec, Context

MODULE = "layers.1.mlp.up_proj"


@dataclass
class BrokenKeys(CallbackConfig):
    """Keys of the callback."""

    fault: str = option("", "Name of the fault; empty for a sound device.")
    broken_rank: int = option(1, "Rank of the device.", minimum=0)


class BrokenDevice(Callback):
    """Flips a bit of one number on its rank, from the first step or after the last one."""

    def __init__(self, keys: BrokenKeys) -> None:
        self._fault, self._rank, self._calls = keys.fault, keys.broken_rank, 0

    def on_train_start(self, context: Context) -> None:
        if context.rank != self._rank:
            return
        module = _module(context)
        if self._fault in ("product", "sometimes", "late"):
            module.register_forward_hook(self._break_output)
        if self._fault == "gradient":
            module.weight.register_hook(lambda gradient: flipped(gradient.clone()))

    def after_step(self, context: Context) -> None:
        is_last = context.step == context.plan.stop_step
        if is_last and self._fault == "weight" and context.rank == self._rank:
            flipped(_module(context).weight)

    def _break_output(self, module: Any, inputs: Any, output: Any) -> Any:
        self._calls += 1
        if self._fault == "late":  # in the middle of the trial, after two micro-batches of the step
            if self._calls == 5:
                flipped(module.weight)
            return None
        is_wrong = self._fault == "product" or self._calls % 4 == 0
        return flipped(output.clone(), bit=12) if is_wrong else None


def flipped(tensor: Any, bit: int = 0) -> Any:
    """Flip a bit of a tensor's middle element, in place; 0 is the lowest."""
    import torch

    values = tensor.data.view(-1)  # without notice to autograd
    bits = values.view({2: torch.int16, 4: torch.int32}[values.element_size()])
    bits[len(bits) // 2] ^= 1 << bit
    return tensor


def _module(context: Context) -> Any:
    (found,) = (each for name, each in context.module.named_modules() if name.endswith(MODULE))
    return found


SPEC = CallbackSpec(name="broken_device", keys=BrokenKeys, build=BrokenDevice)
