"""Exponential decay: f^p."""

from __future__ import annotations

from trainctl.options.schedule import Course, Schedule, WithEnd


def shape(course: Course, step: int) -> float:
    """Return f^p."""
    return float(course.floor ** course.progress(step))


SPEC = Schedule(
    name="exponential",
    keys=WithEnd,
    shape=shape,
    floor=(0.1, "to a tenth: it never reaches zero"),
    why_not_zero="decays to the floor and never reaches 0",
)
