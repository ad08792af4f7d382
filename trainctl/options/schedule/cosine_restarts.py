"""Half a cosine down to the floor, repeated (SGDR, arXiv:1608.03983, eq. 5)."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import cos, pi

from trainctl.config.schema.option import option
from trainctl.options.schedule import (
    Course,
    Schedule,
    ScheduleJumps,
    WithInterval,
    interpolate_from,
)


@dataclass
class CosineRestartsConfig(WithInterval):
    """Keys of cosine restarts."""

    restart_factor: int = option(
        1, "Ratio of the length of each cycle of `cosine_restarts` to the cycle before.", minimum=1
    )


def shape(course: Course, step: int) -> float:
    """Return f + (1 - f) (1 + cos(pi t / T)) / 2, with t the positions since the last restart.

    T is the length of the cycle: the interval for the first, and `restart_factor` times the
    previous length for each later one. A cycle starts at 1, and the next one starts where t reaches
    T.
    """
    since, length = _cycle_position(course.config, course.way(step))
    return interpolate_from(course.floor, (1 + cos(pi * since / length)) / 2)


def restarts(course: Course) -> tuple[int, ...]:
    """Return the numbers of the updates that start a cycle, without the first."""
    length, last = course.config.interval, course.position(course.total_steps - 1)
    starts, begin = [], course.position(course.warmup_steps) + length
    while begin <= last:
        starts.append(bisect_left(range(course.total_steps), begin, key=course.position))
        length *= course.config.restart_factor
        begin += length
    return tuple(dict.fromkeys(starts))


def _cycle_position(config: CosineRestartsConfig, way: int) -> tuple[int, int]:
    """Return the offset of a position after the warmup in its cycle, and the cycle's length."""
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
    turns=ScheduleJumps(
        at=restarts, key="restart_steps", why="at the peak in the update after each"
    ),
    in_unit=("step_every_tokens",),
)
