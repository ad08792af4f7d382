"""Polynomial decay to the floor: a power of the remaining share."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.schedule import Course, Schedule, WithEnd, interpolate_from


@dataclass
class PolynomialConfig(WithEnd):
    """Keys of polynomial decay."""

    power: float = option(1.0, "Exponent of the polynomial decay.", above=0)


def shape(course: Course, step: int) -> float:
    """Return f + (1 - f) (1 - p)^power."""
    return interpolate_from(course.floor, (1 - course.progress(step)) ** course.config.power)


SPEC = Schedule(name="polynomial", keys=PolynomialConfig, shape=shape, floor=(0.1, "to a tenth"))
