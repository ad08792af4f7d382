"""Learning rate that falls by a root of the share of the run that is left."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.schedule import Course, Schedule, WithFloor, interpolate_from


@dataclass
class RootKeys(WithFloor):
    """Keys of `schedule=root`, beside those of every schedule with a floor."""

    degree: float = option(2.0, "Degree of the root.", above=0)


def shape(course: Course, step: int) -> float:
    """Return f + (1 - f) (1 - p)^(1 / degree)."""
    left: float = 1 - course.progress(step)
    return interpolate_from(course.floor, left ** (1 / course.config.degree))


SPEC = Schedule(name="root", keys=RootKeys, shape=shape, floor=(0.0, "down to zero"))
