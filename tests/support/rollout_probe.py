"""Runs inside ranks: rollouts of a tiny model, what the model itself says of them, and a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from fsdp2_probe import peak_bytes
from rank_processes import Case
from torch.profiler import ProfilerActivity, profile

from trainctl.engines.process import Process
from trainctl.train.rollouts import Completion, RolloutRow, Sampler
from trainctl.train.rollouts import generate as generation
from trainctl.train.rollouts.generate import Generation, SlotCache, Window, generate
from trainctl.train.session import Session, assemble

ENDS = range(12)
"""About one token in twenty ends an answer."""
SAMPLER = Sampler(seed=3, temperature=0.9, top_p=0.95)
SETTINGS = Generation(max_tokens=20, batch_size=3, prefill_tokens=40, ends=ENDS, vocab_size=200)
ROWS = [
    RolloutRow(tuple(int(id) for id in np.random.default_rng(n).integers(0, 259, 1 + 5 * n)), n, s)
    for n in range(4)
    for s in range(3)
]
"""Rows of prompts of 1 to 16 tokens, three answers each."""
STEPS = 2


@dataclass
class Rollouts:
    """Answers of one case."""

    answers: list[Completion]
    others: list[Completion]
    """Answers to the same rows in the reversed order, without a batch, without whole weights."""
    expected: list[np.ndarray]
    """Log-probability of each token of some answers by forward passes without a cache."""
    losses: list[float]
    """Losses of the steps after each rollout."""


def rollouts(cases: list[Case], process: Process) -> list[Rollouts]:
    """Generate and train alternately, on the layout of each case."""
    generation.SPARE_COLUMNS = 2  # so that the cache is moved often
    return [_of(case, process) for case in cases]


def _of(case: Case, process: Process) -> Rollouts:
    session = assemble(case.plan, case.run, process)
    engine, losses = session.engine, []
    arguments = (engine, process)
    kept: dict[tuple[int, int], Completion] = {}

    def keep(row: RolloutRow, answer: Completion) -> None:
        kept[row.number, row.sample] = answer

    answers = generate(*arguments, ROWS, SAMPLER, SETTINGS, keep)
    for row, answer in zip(ROWS, answers, strict=True):
        here = kept.get((row.number, row.sample), answer)
        assert np.array_equal(here.ids, answer.ids)
    assert len(kept) == len(ROWS) // session.mesh.data.size
    single = replace(SETTINGS, batch_size=1, holds_weights=False)
    others = generate(*arguments, ROWS[::-1], SAMPLER, single)[::-1]
    some = list(zip(ROWS, answers, strict=True))[::3]
    expected = [_expected(session, row, answer) for row, answer in some]
    for step in range(STEPS):
        engine.set_learning_rate(1.0)
        batch = session.plan.batch
        losses.append(
            engine.accumulate(session.training.step(step * batch.global_batch_size, batch))[0]
        )
        engine.update(norm=session.gradients.norms().total, clip_at=1.0)
        generate(*arguments, ROWS[:3], SAMPLER, SETTINGS)
    engine.close()
    return Rollouts(answers, others, expected, losses)


def losses(cases: list[Case], process: Process) -> list[float]:
    """Return the losses of the same steps without rollouts."""
    (case,) = cases
    session, found = assemble(case.plan, case.run, process), []
    engine, batch = session.engine, case.plan.batch
    for step in range(STEPS):
        engine.set_learning_rate(1.0)
        samples = session.training.step(step * batch.global_batch_size, batch)
        found.append(engine.accumulate(samples)[0])
        engine.update(norm=session.gradients.norms().total, clip_at=1.0)
    engine.close()
    return found


def _expected(session: Session, row: RolloutRow, answer: Completion) -> Any:
    ids = [*row.prompt, *answer.ids.tolist()]
    session.engine.module.eval()
    scores = [
        session.engine.next_scores(ids[: len(row.prompt) + place])
        for place in range(len(answer.ids))
    ]
    session.engine.module.train()
    found = (torch.stack(scores) / SAMPLER.temperature).log_softmax(dim=-1)
    return found[torch.arange(len(scores)), torch.from_numpy(answer.ids)].numpy()


@dataclass
class RolloutBytes:
    """Bytes of tensors in a rollout, on a rank."""

    cache: int
    peak: int
    """Peak above what was there before."""


def memory(cases: list[Case], process: Process) -> list[RolloutBytes]:
    """Measure a rollout of each case, in which no answer ends before the most tokens."""
    return [_memory_of(case, process) for case in cases]


def _memory_of(case: Case, process: Process) -> RolloutBytes:
    session = assemble(case.plan, case.run, process)
    caches: list[SlotCache] = []
    make = generation.SlotCache

    def watched(window: Window) -> SlotCache:
        caches.append(make(window))
        return caches[0]

    generation.SlotCache = watched
    settings = replace(SETTINGS, batch_size=len(ROWS), ends=(), prefill_tokens=64)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        generate(session.engine, process, ROWS, SAMPLER, settings)
    generation.SlotCache = make
    cache = sum(tensor.nbytes for tensor in caches[0]._tensors)
    session.engine.close()
    return RolloutBytes(cache, peak_bytes(profiler))
