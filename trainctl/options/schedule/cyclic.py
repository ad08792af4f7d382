"""A triangle from the floor to the peak and back, repeated (arXiv:1506.01186)."""

from __future__ import annotations

from trainctl.options.schedule import Course, Schedule, WithInterval, interpolate_from


def shape(course: Course, step: int) -> float:
    """Return 1 - |2 t - 1|, scaled to [f, 1], with t the share of the period that has passed."""
    period = course.config.interval
    return interpolate_from(course.floor, 1 - abs(2 * (course.way(step) % period / period) - 1))


SPEC = Schedule(
    name="cyclic",
    keys=WithInterval,
    shape=shape,
    floor=(0.1, "from a tenth and back"),
    in_unit=("step_every_tokens",),
)
