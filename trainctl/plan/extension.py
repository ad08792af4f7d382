"""Resuming with another schedule than the checkpoint was trained with."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ScheduleUnit
from trainctl.options.schedule import WithDecay
from trainctl.plan.schedule import Curve
from trainctl.plan.types import RunPlan

RATE_TOLERANCE = 1e-9
"""Relative tolerance: two closed forms of the same curve differ by rounding."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """Jump of the learning rate at a resume."""

    step: int
    """Number of the first update after the resume, from 1."""
    before: float
    """Learning rate of that update in the earlier plan; beyond its end, of its last update."""
    now: float
    """Learning rate of that update in the new plan."""


def change_of_rate(before: RunPlan, now: RunPlan, step: int) -> RateChange | None:
    """Return the jump of the learning rate when `now` resumes after `step` updates of `before`.

    Returns None if the rate is the one planned before, or stays at its last value.
    """

    def rate(plan: RunPlan, update: int) -> float:
        return plan.peak_lr * Curve.of(plan).factor(update)

    planned, last, new = rate(before, step), rate(before, max(0, step - 1)), rate(now, step)
    if any(abs(old - new) <= RATE_TOLERANCE * max(old, new) for old in (planned, last)):
        return None
    return RateChange(step + 1, planned, new)


def step_before_decay(before: RunPlan, now: RunPlan, step: int) -> int | None:
    """Return the last step that `now` can resume from if `step` is too late; None otherwise.

    A run with the schedule wsd can be extended until its decay begins. Weights that were trained in
    the decay are not weights of a longer stable phase, so they are not taken back to the peak.
    """
    if not all(isinstance(plan.config.schedule, WithDecay) for plan in (before, now)):
        return None
    old, new = Curve.of(before), Curve.of(now)
    rises = new.factor(step) > old.factor(step) * (1 + RATE_TOLERANCE)
    return old.stable_steps if step > old.stable_steps and rises else None


def miscounts_tokens(before: RunPlan, now: RunPlan, step: int) -> bool:
    """Return True if a schedule in tokens assumes other batches than were trained on so far."""
    if now.config.schedule.unit is not ScheduleUnit.tokens:
        return False
    return before.batches.tokens_before(step) != now.batches.tokens_before(step)
