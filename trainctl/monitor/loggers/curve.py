"""The points in a run's records: those that were made, and those that the run stands by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainctl.monitor.loggers.points import KINDS, point_of
from trainctl.options.logger import Point
from trainctl.runs.records import Event, iter_events


@dataclass
class CurveReader:
    """How far records were read."""

    attempt: int = 0
    """The newest attempt in them."""
    step: int = -1
    """The last step of the run's curve in them; -1 before the first."""
    points: int = 0
    """How many points were in them."""

    def points_of(self, events: Iterable[Event]) -> Iterator[tuple[Point, bool]]:
        """Yield the points in the records that come next, and whether the run goes back with one.

        The last attempt wins, and in it what came last: as `runs.records.step_curve` has it.
        """
        for event in events:
            point = point_of(event, self.points + 1)
            if point is None or event["attempt"] < self.attempt:
                continue
            is_step = event["event"] == "step"
            goes_back = is_step and point.step <= self.step
            if is_step:
                self.step = point.step
            self.attempt, self.points = event["attempt"], point.number
            yield point, goes_back


def curve(records: Path, points: int) -> Iterator[Point]:
    """Yield the points of the run as it stood after so many of them, in order, each step once.

    Reads the records twice, and keeps two numbers a step.

    Args:
        points: How many points count.

    Raises:
        TrainctlError: The records cannot be read (exit code 5).
    """
    kept: dict[str, list[tuple[int, int]]] = {kind: [] for kind, _ in KINDS.values()}
    for point, goes_back in _first(records, points):
        for kind, stack in kept.items():
            while (goes_back or kind == point.kind) and stack and stack[-1][0] >= point.step:
                stack.pop()
        kept[point.kind].append((point.step, point.number))
    numbers = iter(sorted(number for stack in kept.values() for _, number in stack))
    wanted = next(numbers, None)
    for point, _ in _first(records, points):
        if point.number == wanted:
            yield point
            wanted = next(numbers, None)


def _first(records: Path, points: int) -> Iterator[tuple[Point, bool]]:
    for point, goes_back in CurveReader().points_of(iter_events(records, *KINDS)):
        if point.number > points:
            return
        yield point, goes_back
