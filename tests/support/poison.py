"""Runs with a multiplied loss of chosen samples, and runs without these samples.

A guard has to survive the first kind; the second, undisturbed, is the result to expect of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch
from rank_processes import Case, train_cases

from trainctl.errors import TrainctlError
from trainctl.plans.types import Batch
from trainctl.runs.records import EventWriter
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.loop import Trainer
from trainctl.train.nonfinite import module_paths
from trainctl.train.session import Session, assemble

NAN = float("nan")


@dataclass(frozen=True)
class Poisoned(Case):
    """Plan to train, with faults of its samples."""

    poison: tuple[tuple[int, float], ...] = ()
    """Factor of the loss of a micro-batch with that sample, by sample counter."""
    missing: tuple[tuple[int, int], ...] = ()
    """Ranges of sample counters that the order skips."""
    gradient_only: bool = False
    """Multiply only the gradient, and keep the loss as it is."""
    struck: str = ""
    """Place of a NaN from the beginning: ``weight`` (one element), ``activation`` or ``gradient``
    (of the output), and the name of a linear layer.
    """


@dataclass(frozen=True)
class Outcome:
    """Observations of a rank during its run."""

    error: str
    """Message of the error that ended it; empty if there was none."""
    hint: str
    exit_code: int
    digest: str
    """Digest of the whole weights."""
    is_finite: bool
    """Whether all weights are finite."""


def train_poisoned(case: Poisoned, world_size: int = 2) -> list[Outcome]:
    """Train it; return the outcome of each rank."""
    return train_cases(world_size, [case], probe="poison:train")


def train(cases: list[Poisoned], process: Any) -> Outcome:
    """Train on a rank."""
    (case,) = cases
    session = assemble(case.plan, case.run, process)
    if case.poison:
        _poison(session, case)
    session.training = _WithoutSamples(session.training, case.missing)  # type: ignore[assignment]
    if case.struck:
        _strike(session, *case.struck.split())
    error, hint, exit_code = "", "", 0
    writer = EventWriter(case.run.events, case.attempt) if process.is_first else nullcontext()
    with writer as events:
        try:
            Trainer(session, events).train()
        except TrainctlError as failure:
            error, hint, exit_code = failure.message, failure.hint, int(failure.exit_code)
    digest, is_finite = _weights(session)
    process.barrier()
    session.engine.close()
    return Outcome(error, hint, exit_code, digest, is_finite)


def _poison(session: Session, case: Poisoned) -> None:
    data, engine = session.training, session.engine
    counters, factors = zip(*case.poison, strict=True)
    indices = data.order.at(np.array(counters)).index
    of_sample = dict(zip(indices.tolist(), factors, strict=True))
    factor, inputs = [1.0], engine._arguments

    def note(batch: Any) -> Any:
        factor[0] = note_factor(of_sample, batch)
        return inputs(batch)

    def multiply(module: Any, arguments: Any, loss: torch.Tensor) -> torch.Tensor | None:
        wrong = factor[0]
        if not module.training or wrong == 1.0:
            return None
        if case.gradient_only:
            loss.register_hook(lambda gradient: gradient * wrong)
            return None
        return loss * wrong

    engine._arguments = note  # type: ignore[method-assign]
    if session.mesh.pipeline.size == 1:
        getattr(engine, "deepspeed", engine).module.register_forward_hook(multiply)
        return
    # DeepSpeed's pipeline: multiply the whole step's gradient but never the loss, which is recorded
    # before.
    assert case.gradient_only
    accumulate, stages = engine.accumulate, engine.deepspeed

    def accumulate_noted(batches: Any, beside: Any = None) -> Any:
        worst = [note_factor(of_sample, batch) for batch in batches]
        if session.mesh.pipeline.is_last:
            loss_of = stages.module.loss_fn
            stages.module.loss_fn = lambda *given: loss_of(*given) * max(worst, key=_badness)
            try:
                return accumulate(batches, beside)
            finally:
                stages.module.loss_fn = loss_of
        return accumulate(batches, beside)

    engine.accumulate = accumulate_noted  # type: ignore[method-assign]


def _strike(session: Session, what: str, name: str) -> None:
    """Inject a NaN into the named layer's weight, activation or gradient."""
    if what == "weight":
        state = session.state
        for fragment in state.fragments:
            is_first = fragment.start == 0 and (not fragment.shard or fragment.shard.start == 0)
            if fragment.name == f"{name}.weight" and is_first:
                with state.swapped_in(fragment.tensor, changes=True):
                    fragment.of(state.tensor(fragment.tensor, MASTER)).view(-1)[0] = NAN
        state.copy_masters_to_parameters()
        return

    def hook(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor | None:
        if what == "activation":
            return output * NAN
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * NAN)
        return None

    for module, path in module_paths(session).items():
        if path == name:
            module.register_forward_hook(hook)


def note_factor(of_sample: dict[int, float], batch: Any) -> float:
    """Return the factor of a micro-batch: the largest of its samples, NaN above all."""
    return max((of_sample.get(int(i), 1.0) for i in batch.sample_ids), key=_badness)


def _badness(factor: float) -> float:
    return float("inf") if factor != factor else factor


class _WithoutSamples:
    """Training data whose order skips some samples."""

    def __init__(self, data: Any, missing: tuple[tuple[int, int], ...]) -> None:
        self._data, self._missing = data, missing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int, batch: Batch) -> Any:
        for first, end in self._missing:
            if first_sample >= first:
                first_sample += end - first
        return self._data.step(first_sample, batch)


def _weights(session: Session) -> tuple[str, bool]:
    digest, is_finite = hashlib.sha256(), True
    for parameter in _whole(session.engine):
        digest.update(parameter.detach().float().numpy().tobytes())
        is_finite &= bool(parameter.isfinite().all())
    return digest.hexdigest(), is_finite


def _whole(engine: Any) -> Iterator[torch.Tensor]:
    """Yield each parameter, gathered for the duration of the iteration."""
    if not hasattr(engine, "deepspeed"):
        engine.states.copy_masters_to_parameters()
        yield from (parameter.full_tensor() for parameter in engine.module.parameters())
        return
    for parameter in engine.pieces:
        with deepspeed.zero.GatheredParameters([parameter]):
            yield parameter
