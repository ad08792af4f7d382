"""The inverse square root of the update's number (arXiv:1706.03762, eq. 3)."""

from __future__ import annotations

from math import sqrt

from trainctl.options.schedule import Course, Schedule, WithFloor


def shape(course: Course, step: int) -> float:
    """Return max(f, sqrt(W / x(s + 1))), with `warmup_from_zero` of x(s)."""
    start = max(course.position(course.warmup_steps), course.position(1))
    return max(course.floor, sqrt(start / course.position(max(1, course.risen_steps(step)))))


SPEC = Schedule(
    name="inverse_sqrt",
    keys=WithFloor,
    shape=shape,
    floor=(0.0, "no floor, arXiv:1706.03762"),
    # The formula is 1 at the last update of the warmup, so the warmup rises to 1 there.
    rise=lambda course, risen: risen,
)
