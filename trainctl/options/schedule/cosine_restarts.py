"""Half a cosine down to the floor, again and again (SGDR, arXiv:1608.03983, eq. 5)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import cos, pi

from trainctl.config.schema.option import option
from trainctl.options.schedule import Course, Schedule, ScheduleTurns, WithInterval, between


@dataclass
class CosineRestartsConfig(WithInterval):
    """Its own keys."""

    restart_factor: int = option(
        1, "Length of each cycle of `cosine_restarts` over that of the one before.", minimum=1
    )


def shape(course: Course, step: int) -> float:
    """f + (1 - f) (1 + cos(pi t / T)) / 2, t the way since the last restart.

    The first cycle has the length T of the interval, each later one `restart_factor` times that of
    the one before; it begins at 1, and the next one where t is T.
    """
    since, length = _cycle(course.config, course.way(step))
    return between(course.floor, (1 + cos(pi * since / length)) / 2)


def restarts(course: Course) -> tuple[int, ...]:
    """Numbers of the updates that begin a cycle, without the first."""
    length, last = course.config.interval, course.position(course.total_steps - 1)
    starts, begin = [], course.position(course.warmup_steps) + length
    while begin <= last:
        starts.append(bisect_left(range(course.total_steps), begin, key=course.position))
        length *= course.config.restart_factor
        begin += length
    return tuple(dict.fromkeys(starts))


def _cycle(config: CosineRestartsConfig, way: int) -> tuple[int, int]:
    """Return how far into its cycle a position after the warmup is, and the cycle's length."""
    length, factor = config.interval, config.restart_factor
    if factor == 1:
        return way % length, length
    while way >= length:
        way, length = way - length, length * factor
    return way, length


SPEC = Schedule(
    name="cosine_restarts",
    keys=CosineRestartsConfig,
    shape=shape,
    floor=(0.0, "down to zero before each restart, arXiv:1608.03983"),
    turns=ScheduleTurns(
        at=restarts, key="restart_steps", why="at the peak in the update after each"
    ),
    in_unit=("step_every_tokens",),
)
