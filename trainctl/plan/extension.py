"""Going on with another schedule than the one that a checkpoint was trained with."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ScheduleUnit
from trainctl.options.schedule import WithDecay
from trainctl.plan.schedule import Curve
from trainctl.plan.types import RunPlan

SAME = 1e-9
"""Relative; two closed forms of the same curve differ by rounding."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """A learning rate that is another one from a resume on."""

    step: int
    """Number of the first update after it, from 1."""
    before: float
    """Rate that the earlier plan had for that update; beyond its end, that of its last."""
    now: float
    """Rate that it gets."""


def change_of_rate(before: RunPlan, now: RunPlan, step: int) -> RateChange | None:
    """Where the learning rate jumps when `now` goes on after `step` updates of `before`.

    Returns:
        None if it is what it would have been, or stays what it last was.
    """

    def rate(plan: RunPlan, update: int) -> float:
        return plan.peak_lr * Curve.of(plan).factor(update)

    planned, last, new = rate(before, step), rate(before, max(0, step - 1)), rate(now, step)
    if any(abs(old - new) <= SAME * max(old, new) for old in (planned, last)):
        return None
    return RateChange(step + 1, planned, new)


def step_before_decay(before: RunPlan, now: RunPlan, step: int) -> int | None:
    """Return the last step that `now` can go on from, if a checkpoint after `step` updates is too
    late.

    A run with the schedule wsd can be made longer as long as it has not begun to decay. Weights
    that have seen a part of the decay are not those of a longer stable phase, so they are not taken
    back to the peak.

    Returns:
        None if `step` is early enough, or nothing is asked that it is too late for.
    """
    if not all(isinstance(plan.config.schedule, WithDecay) for plan in (before, now)):
        return None
    old, new = Curve.of(before), Curve.of(now)
    rises = new.factor(step) > old.factor(step) * (1 + SAME)
    return old.stable_steps if step > old.stable_steps and rises else None


def miscounts_tokens(before: RunPlan, now: RunPlan, step: int) -> bool:
    """Whether a schedule in tokens takes other batches for granted than were trained on so far."""
    if now.config.schedule.unit is not ScheduleUnit.tokens:
        return False
    return before.batches.tokens_before(step) != now.batches.tokens_before(step)
