"""Runs inside a rank: trains in fp64 what a plan trains in fp32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from rank_processes import Case
from ranks import forget_groups, train_case
from torch.overrides import TorchFunctionMode
from transformers.integrations import moe

from trainctl.engines.process import Process

READERS = (torch.Tensor.view, torch.asarray, torch.frombuffer)
"""Functions that say with a type what bytes mean."""


class InFp64(TorchFunctionMode):
    """Replaces fp32 by fp64 in every call of torch: types, casts and new tensors.

    Models, losses and optimizers name fp32 themselves, and so compute in fp64 without a change.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function in READERS:
            return function(*args, **(kwargs or {}))
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        wider = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return function(*map(_widened, args), **wider)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def train(cases: list[Case], process: Process) -> None:
    """Train the cases; their records have the curves."""
    torch.set_default_dtype(torch.float64)
    DeepSpeedEngine._DeepSpeedEngine__check_params = lambda *_: None  # type: ignore[attr-defined]
    accelerator = get_accelerator()
    known = [*accelerator.supported_dtypes(), torch.float64]
    accelerator.supported_dtypes = lambda: known
    moe._can_use_grouped_mm = lambda *_: False  # torch has no grouped products of fp64
    with InFp64():
        for case in cases:
            train_case(case, process)
            forget_groups()
