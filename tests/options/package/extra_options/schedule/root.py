"""A root of what is left of the way."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.schedule import Course, Schedule, WithFloor, interpolate_from


@dataclass
class RootConfig(WithFloor):
    """Keys of `schedule=root`."""

    degree: float = option(2.0, "Degree of the root.", above=0)


def shape(course: Course, step: int) -> float:
    """f + (1 - f) (1 - p)^(1 / degree)."""
    return interpolate_from(course.floor, (1 - course.progress(step)) ** (1 / course.config.degree))


SPEC = Schedule(name="root", keys=RootConfig, shape=shape, floor=(0.0, "down to zero"))
