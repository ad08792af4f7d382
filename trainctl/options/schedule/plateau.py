"""Drops by a factor each time the held-out loss has stopped falling for a while."""

from __future__ import annotations

from trainctl.options.schedule import WHOLE_DROPS, Course, Schedule, WithPatience


def shape(course: Course, step: int) -> float:
    """Return max(f, step_factor^n) after n drops, which depend on the held-out loss, not on the
    step.
    """
    return float(max(course.floor, course.config.step_factor**course.drops))


SPEC = Schedule(name="plateau", keys=WithPatience, shape=shape, floor=WHOLE_DROPS)
