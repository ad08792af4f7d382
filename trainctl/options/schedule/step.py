"""Drops by a factor at every interval."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.options.schedule import WHOLE_DROPS, Course, Schedule, WithDrops, WithInterval


@dataclass
class StepConfig(WithDrops, WithInterval):
    """Keys of step decay."""


def shape(course: Course, step: int) -> float:
    """Return max(f, step_factor^floor((x(s) - W) / interval))."""
    config: StepConfig = course.config
    return max(course.floor, config.step_factor ** (course.way(step) // config.interval))


SPEC = Schedule(
    name="step", keys=StepConfig, shape=shape, floor=WHOLE_DROPS, in_unit=("step_every_tokens",)
)
