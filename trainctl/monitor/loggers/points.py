"""Points of metrics in a run's records, with the same names for every logger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.options.logger import Point
from trainctl.runs.records import Event, iter_events, number

TRAIN = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "learning_rates": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "grad_norms": "train/grad_norm",
    "clip_at": "train/clip_at",
    "z_loss": "train/z_loss",
    "experts": "train/experts",
    "objective": "train/objective",
    "loss_scale": "train/loss_scale",
    "tokens": "train/tokens",
    "sources": "train/samples",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "seconds": "seconds",
    "peak_bytes": "memory/peak_bytes",
    "values": "train",
}
EVALUATION = {
    "loss": "evaluation/loss",
    "ema_loss": "evaluation/ema_loss",
    "objective": "evaluation/objective",
    "sources": "evaluation/loss",
    "values": "evaluation",
}
KINDS = {"step": ("train", TRAIN), "evaluation": ("evaluation", EVALUATION)}
"""Kinds of records that have metrics: the kind of their points, and their fields with the names of
the metrics. A field that is a mapping or a list gives one metric per entry, such as
`seconds/total`.
"""

CALLBACK = "callback"
"""Kind of the records of callbacks, whose metrics are `CALLBACK/NAME/KEY`."""


def point_of(event: Event, place: int) -> Point | None:
    """Return the point with the metrics of a record; None if it has no metrics.

    Args:
        place: Number of the point.
    """
    if not isinstance(event.get("step"), int):
        return None
    if event["event"] == CALLBACK:  # each name is a series of its own
        kind = f"{event['callback']}/{event['name']}"
        names = {"values": kind}
    elif event["event"] in KINDS:
        kind, names = KINDS[event["event"]]
    else:
        return None
    values = {
        name: value
        for field, prefix in names.items()
        for name, value in _numbers(prefix, event.get(field))
    }
    time = float(event.get("time", 0.0))
    return Point(number=place, kind=kind, step=event["step"], time=time, values=values)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield names and numbers in a field, NaN and infinities included; omit other values."""
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from _numbers(f"{name}/{part}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}/{index}", item)
    elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
        yield name, number(value)


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
