"""Points of metrics in a run's records: all of them, and those that count after all resumes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainctl.monitor.loggers.points import CALLBACK, KINDS, point_of
from trainctl.options.logger import Point
from trainctl.runs.records import Event, iter_events


@dataclass
class CurveReader:
    """Reader of points, with its progress in the records."""

    attempt: int = 0
    """Newest attempt read so far."""
    step: int = -1
    """Last step of the run's curve read so far; -1 before the first."""
    points: int = 0
    """Number of points read so far."""

    def points_of(self, events: Iterable[Event]) -> Iterator[tuple[Point, bool]]:
        """Yield the points in the next records, each with whether the run goes back at it.

        The last attempt wins, and in it the later record, as in `runs.records.step_curve`.
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
    """Yield the points that count after the first `points` points, in order, each step once.

    Reads the records twice, and keeps two numbers per step.

    Raises:
        TrainctlError: The records cannot be read (exit code 5).
    """
    kept: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
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
    for point, goes_back in CurveReader().points_of(iter_events(records, *KINDS, CALLBACK)):
        if point.number > points:
            return
        yield point, goes_back
