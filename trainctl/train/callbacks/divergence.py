"""Detection of a loss that has diverged. It only reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainctl.options.callbacks import Callback, Context
from trainctl.train.callbacks.context import Journal, StepState

DIVERGED_STEPS = 10
"""Steps in a row that must agree: a spike is shorter, or comes down in between."""
UNIFORM_LOSS_FACTOR = 1.5
"""Limit, as a multiple of ln(vocabulary): the loss of uniform predictions, near fresh weights'."""
ABOVE_BEST = 2.0
"""Limit, as a multiple of the run's lowest mean loss over `DIVERGED_STEPS` steps."""
LEAST_SHARE = 0.5
"""Least limit, as a multiple of ln(vocabulary).

A small loss may double on harder text; a model that has unlearnt everything but token frequencies
is above half.
"""
ABOVE_START = 3.0
"""Limit, as a multiple of the mean loss of the first steps, for losses other than cross entropy."""


class Divergence:
    """Detector of a loss that stays far above what the run had reached. It only reports.

    The loss has diverged once each of the last `DIVERGED_STEPS` steps is above the limit, and has
    recovered once each is below it. The limit of a cross entropy is `UNIFORM_LOSS_FACTOR` times
    ln(vocabulary), or `ABOVE_BEST` times the run's best loss if that is lower, but at least
    `LEAST_SHARE` of ln(vocabulary). Other objectives have their own units: their limit is
    `ABOVE_START` times the loss of the first steps, or none if that is not positive.

    Args:
        vocab_size: Number of token ids that the model scores, for a cross entropy; None for others.
    """

    def __init__(self, vocab_size: int | None) -> None:
        self._ignorance = None if vocab_size is None else math.log(vocab_size)
        self._recent: deque[float] = deque(maxlen=DIVERGED_STEPS)
        self._best, self._start = math.inf, math.inf
        self._has_diverged = False

    def see(self, loss: float, step: int) -> dict[str, Any] | None:
        """Add the loss of a step; return the fields of the record if the verdict changes."""
        self._recent.append(loss)
        if len(self._recent) < DIVERGED_STEPS:
            return None
        mean = math.fsum(self._recent) / DIVERGED_STEPS
        self._best = min(self._best, mean)
        if math.isinf(self._start):
            self._start = mean
        times, reference, value = self._limit()
        limit = times * value
        deciding = max(self._recent) if self._has_diverged else min(self._recent)
        is_over = deciding > limit
        if is_over == self._has_diverged:
            return None
        self._has_diverged = is_over
        return {
            "diverged": is_over,
            "step": step,
            "loss": mean,
            "limit": limit,
            "times": times,
            "reference": reference,
        }

    def _limit(self) -> tuple[float, str, float]:
        """Return the limit as a factor, and the name and value of the reference it multiplies."""
        if self._ignorance is None:
            return ABOVE_START, "start", self._start if self._start > 0 else math.inf
        limits = (
            (ABOVE_BEST, "best", self._best),
            (LEAST_SHARE, "vocabulary", self._ignorance),
        )
        of_run = max(limits, key=lambda each: each[0] * each[2])
        ceiling = (UNIFORM_LOSS_FACTOR, "vocabulary", self._ignorance)
        return min(ceiling, of_run, key=lambda each: each[0] * each[2])

    def state(self) -> dict[str, float]:
        """Return what `restore` needs; empty before `DIVERGED_STEPS` steps."""
        return {} if math.isinf(self._best) else {"best": self._best, "start": self._start}

    def restore(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint. Each attempt reports a divergence anew."""
        self._recent.clear()
        self._best = float(state.get("best", math.inf))
        self._start = float(state.get("start", math.inf))


class DivergenceRecords(Callback):
    """Records when the loss diverges and when it recovers."""

    def __init__(self, divergence: Divergence, now: StepState, journal: Journal) -> None:
        self._divergence, self._now, self._journal = divergence, now, journal

    def after_step(self, context: Context) -> None:
        step = self._now.made
        assert step is not None
        if step.intervention is None:
            verdict = self._divergence.see(step.loss, context.step)
            if verdict is not None:
                rate = context.learning_rate
                self._journal.record("divergence", learning_rate=rate, **verdict)

    def before_save(self) -> Mapping[str, Any]:
        return self._divergence.state()

    def after_load(self, state: Mapping[str, Any]) -> None:
        self._divergence.restore(state)
