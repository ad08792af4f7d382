"""Rank without an engine: the state that a saver copies, and a process group of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainctl.config.schema import ModelConfig
from trainctl.engines.process import Process
from trainctl.engines.shards import Fragment
from trainctl.plans.identity import model_description
from trainctl.train.checkpoint.optimizer_state import MASTER

NUMEL = 1000


class PlainState:
    """Two fp32 tensors and one moment of each, whole on this rank."""

    is_swapped = False

    def __init__(self, value: float, rank: int = 0) -> None:
        self.fragments = [
            Fragment(f"parameter.{rank}.{index}", 0, NUMEL, index, 0, owned=True)
            for index in range(2)
        ]
        self._tensors = [
            {name: torch.full((NUMEL,), value) for name in (MASTER, "exp_avg")} for _ in range(2)
        ]

    def fill(self, value: float) -> None:
        for states in self._tensors:
            for tensor in states.values():
                tensor.fill_(value)

    def state_names(self, index: int) -> list[str]:
        return ["exp_avg"]

    def sides(self, fragment: Fragment) -> dict[str, Any]:
        return {}

    def scalars(self) -> dict[str, float]:
        return {"step": 1.0}

    def numel(self, index: int) -> int:
        return NUMEL

    def sync_master_weights(self) -> None:
        pass

    def tensor(self, index: int, name: str) -> torch.Tensor:
        return self._tensors[index][name]

    saved = tensor

    def swapped_in(self, index: int) -> Any:
        return nullcontext()


def facts(step: int, *, ranks: int = 1, weights_only: bool = False) -> dict[str, Any]:
    """Return the manifest's fields other than the fragments."""
    shapes = {f"parameter.{rank}.{index}": [NUMEL] for rank in range(ranks) for index in range(2)}
    return {
        "run": "",
        "model": model_description(ModelConfig(), shapes),
        "weights_only": weights_only,
        "step": step,
        "samples": 0,
        "tokens": 0,
        "metrics": {},
        "corpus_digest": "",
        "shapes": shapes,
    }


@contextmanager
def only_rank() -> Iterator[Process]:
    """Return this process as the only rank."""
    timeout = timedelta(seconds=60)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        group = dist.new_group(backend="gloo")
        yield Process(0, 1, torch.device("cpu"), group, timeout)
    finally:
        dist.destroy_process_group()
