"""Runs inside a rank: kernels, reads of the device and reductions of each step of a training."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from ranks import forget_groups
from torch.utils._python_dispatch import TorchDispatchMode

from trainctl.data.corpora import load_corpora
from trainctl.engines.process import Process
from trainctl.runs.records import EventWriter
from trainctl.train.data import TrainingData
from trainctl.train.loop import Trainer
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights
from trainctl.train.session import assemble

READ, REDUCTION = "read", "reduction"
_NO_KERNELS = ("aten.empty", "aten.detach", "aten._unsafe_view", "prim.", "profiler.")


class Passes(TorchDispatchMode):
    """Counts of operations: kernels by name, reads of the device as `READ`.

    A view launches no kernel, nor does memory that is not filled. torch reads a list from memory of
    the CPU without an operation, so those reads are counted where they are called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._is_host = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten._local_scalar_dense"):
            self._read()
        elif not func.is_view and not name.startswith(_NO_KERNELS):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))

    def _read(self) -> None:
        if not self._is_host:
            self.counts[READ] += 1

    @contextmanager
    def of_lists(self) -> Iterator[None]:
        """Count within the context what is read as a list, except of host reductions."""
        read, reduce = torch.Tensor.tolist, Process.sum

        def tolist(tensor: torch.Tensor) -> Any:
            self._read()
            return read(tensor)

        def summed(process: Process, *values: float, **options: Any) -> list[float]:
            self.counts[REDUCTION] += 1
            self._is_host = True
            try:
                return reduce(process, *values, **options)
            finally:
                self._is_host = False

        torch.Tensor.tolist, Process.sum = tolist, summed  # type: ignore[method-assign]
        try:
            yield
        finally:
            torch.Tensor.tolist, Process.sum = read, reduce  # type: ignore[method-assign]


def trained(cases: list[Any], process: Process) -> list[list[Counter[str]]]:
    """Return the counts of each case, from the start of one step to the start of the next."""
    return [_trained(case, process) for case in cases]


def _trained(case: Any, process: Process) -> list[Counter[str]]:
    session = assemble(case.plan, case.run, process)
    events = EventWriter(case.run.events, case.attempt) if process.is_first else None
    trainer, passes, starts = Trainer(session, events), Passes(), list[Counter[str]]()
    make = trainer._make_step

    def make_noted() -> None:
        starts.append(passes.counts.copy())
        make()

    trainer._make_step = make_noted  # type: ignore[method-assign]
    with passes, passes.of_lists():
        trainer.train()
    session.engine.close()
    forget_groups()
    return [later - earlier for earlier, later in pairwise(starts)]


def bare(cases: list[Any], process: Process) -> list[Counter[str]]:
    """Return the counts of a step of torch alone, with the model and data of each case."""
    return [_bare(case) for case in cases]


def _bare(case: Any) -> Counter[str]:
    """Make three steps of fused AdamW with clipping in bf16; return the counts of the last."""
    plan, config = case.plan, case.plan.config
    model = skeleton(config.model, torch.bfloat16)
    seeds = SeedWeights.of(config.model, model, config.training.seed)
    parameters = list(materialise(model, seeds, torch.device("cpu")))
    corpora = load_corpora(case.run.corpus, config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    groups = [
        {"params": [each for each in parameters if (each.dim() > 1) is decays]}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    for step in range(3):
        with Passes() as passes:
            for batch in data.step(step * plan.batch.global_batch_size, plan.batch):
                logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
                loss = torch.nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), batch.labels.flatten()
                )
                (loss / plan.batch.gradient_accumulation_steps).backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.optimizer.gradient_clipping)
            optimizer.step()
            optimizer.zero_grad()
    return passes.counts


def collected(cases: list[Any], process: Process) -> list[tuple[list[int], bool]]:
    """Return by case the steps behind which this rank made full collections while it trained, and
    whether what the start had built was frozen.
    """
    return [_collected(case, process) for case in cases]


def _collected(case: Any, process: Process) -> tuple[list[int], bool]:
    session = assemble(case.plan, case.run, process)
    events = EventWriter(case.run.events, case.attempt) if process.is_first else None
    trainer, steps, frozen = Trainer(session, events), list[int](), list[int]()

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start" and details["generation"] == 2:
            steps.append(session.progress.step)
            frozen.append(gc.get_freeze_count())

    gc.unfreeze()
    gc.callbacks.append(note)
    try:
        trainer.train()
    finally:
        gc.callbacks.remove(note)
    session.engine.close()
    forget_groups()
    return steps, len(frozen) > 1 and frozen[1] > 100_000
