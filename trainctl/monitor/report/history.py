"""A run's records, read once and as they grow, into columns and marks.

`runs.records.step_curve` computes the same curve from all records at once. Here, a step that is
repeated replaces the old step and all steps after it; the replaced steps are kept as a branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.monitor.loggers.points import CALLBACK, point_of
from trainctl.monitor.report.columns import GrowingColumns
from trainctl.monitor.report.marks import Mark, mark_of
from trainctl.runs.directory import last_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder
from trainctl.runs.records import Event, RecordReader, number

BATCH_BYTES = 4 << 20
"""Bytes of a file that are read and parsed at a time: about 12,000 steps."""

OF_A_BRANCH = (
    "step",
    "attempt",
    "loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second",
    "seconds/total",
)
"""Fields that are kept of steps that do not count any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Steps that were made and do not count: after a rewind, or a resume from before them."""

    attempt: int
    """Attempt that made them."""
    steps: GrowingColumns
    """Steps with the fields in `OF_A_BRANCH`."""
    evaluations: GrowingColumns
    """Evaluations between these steps."""


@dataclass(slots=True, kw_only=True)
class AttemptTimes:
    """Times of an attempt from its records, in Unix seconds; None if it did not get there."""

    number: int
    launched: float
    last: float
    ranks: int | None = None
    first_step_began: float | None = None
    """Start of its first step."""


class History:
    """History of one run, from its files alone.

    Args:
        run: The run. Its records need not exist yet.

    Attributes:
        version: Grows whenever something new was read.
        steps: The steps that count, one row per step, ascending.
        evaluations: The evaluations that count, one row each.
        callbacks: Numbers that callbacks recorded, by CALLBACK/NAME; a row for each record.
        branches: Steps that do not count any more, oldest first.
        marks: Other events, in the order of the records.
        attempts: Times of each attempt, by its number.
        memory: The last `memory` record; None before the first.
        start: The last `start` record; None before the first.
    """

    def __init__(self, run: RunPaths) -> None:
        self.run = run
        self.version = 0
        self._seen: tuple[object, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._reader = RecordReader(self.run.events)
        self._attempt = 0
        self.steps, self.evaluations = GrowingColumns(), GrowingColumns()
        self.callbacks: defaultdict[str, GrowingColumns] = defaultdict(GrowingColumns)
        self.branches: list[Branch] = []
        self.marks: list[Mark] = []
        self.attempts: dict[int, AttemptTimes] = {}
        self.memory: Event | None = None
        self.start: Event | None = None

    def read(self, most_bytes: int | None = None) -> bool:
        """Read what has been appended. Return True if records or the run's state are new.

        A read error counts as nothing new: a file system may fail for a moment. A file that has
        become shorter is a new one, and is read from its beginning.

        Args:
            most_bytes: Bytes to read at most, but at least one record; None reads to the end.
        """
        is_new = self._look()
        try:
            if self._reader.is_cut:
                self._begin()
                is_new = True
            left = most_bytes
            while left is None or left > 0:
                before = self._reader.position
                events = self._reader.read(BATCH_BYTES if left is None else min(left, BATCH_BYTES))
                if self._reader.position == before:
                    break
                left = None if left is None else left - (self._reader.position.size - before.size)
                is_new = True
                for event in events:
                    self._take(event)
        except OSError:
            pass
        self.version += is_new
        return is_new

    @property
    def last_step(self) -> int:
        """Last step that counts; 0 before the first."""
        return int(self.steps.last("step")) if len(self.steps) else 0

    def held_out(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return the numbers of evaluations by `held_out/NAME`, in the rows of their steps."""
        found = self.evaluations
        rows = {step: row for row, step in enumerate(self.steps["step"])} if len(found) else {}
        columns = {}
        for name in (name for name in found.names if name not in ("step", "time")):
            column = np.full(len(self.steps), np.nan)
            for step, value in zip(found["step"], found[name], strict=True):
                if step in rows:
                    column[rows[step]] = value
            columns[f"held_out/{name}"] = column
        return columns

    def _look(self) -> bool:
        """Return True if the run's state or newest attempt changed since the last call."""
        try:
            changed = self.run.status.stat().st_mtime_ns
        except OSError:
            changed = 0
        is_held = find_holder(self.run) is not None  # a launcher that is killed writes no status
        seen = (changed, last_attempt(self.run), is_held)
        is_new, self._seen = seen != self._seen, seen
        return is_new

    def _take(self, event: Event) -> None:
        if event["attempt"] < self._attempt:
            return  # a late record of an earlier attempt does not count
        self._attempt = event["attempt"]
        attempt = self._account(event)
        kind = event["event"]
        if kind == "step":
            self._take_step(event, attempt)
        elif kind == "evaluation" and isinstance(event.get("step"), int):
            # A repeated evaluation replaces the old one, as a repeated step does.
            self.evaluations.cut(self.evaluations.lower_bound("step", event["step"]), ())
            self.evaluations.append(evaluation_values(event))
        elif kind == CALLBACK:
            self._take_callback(event)
        elif kind == "memory" and isinstance(event.get("measured"), Mapping):
            self.memory = event
        elif kind == "start":
            self.start = event
        mark = mark_of(event, self.last_step)
        if mark is not None:
            self.marks.append(mark)

    def _account(self, event: Event) -> AttemptTimes:
        number, time = event["attempt"], _time(event)
        attempt = self.attempts.get(number)
        if attempt is None:
            attempt = self.attempts[number] = AttemptTimes(number=number, launched=time, last=time)
        attempt.last = max(attempt.last, time)
        ranks = event.get("ranks") if event["event"] == "launch" else event.get("world_size")
        if isinstance(ranks, int):
            attempt.ranks = ranks
        return attempt

    def _take_step(self, event: Event, attempt: AttemptTimes) -> None:
        step = event["step"]
        if len(self.steps) and step <= self.steps.last("step"):
            self._leave(step)
        values = step_values(event)
        values["attempt"] = attempt.number
        self.steps.append(values)
        if attempt.first_step_began is None:
            attempt.first_step_began = values["time"] - values.get("seconds/total", 0.0)

    def _take_callback(self, event: Event) -> None:
        """Add the numbers of a callback's record; a repeated one replaces all from its step on."""
        point = point_of(event, 0)
        if point is not None and point.values:
            columns = self.callbacks[point.kind]
            columns.cut(columns.lower_bound("step", point.step), ())
            columns.append({"step": point.step, **point.values})

    def _leave(self, step: int) -> None:
        """Move everything from a step on into a branch."""
        index = self.steps.lower_bound("step", step)
        number = int(self.steps.last("attempt"))
        steps = self.steps.cut(index, OF_A_BRANCH)
        evaluations = self.evaluations.cut(self.evaluations.lower_bound("step", step))
        self.branches.append(Branch(attempt=number, steps=steps, evaluations=evaluations))


def _time(event: Event) -> float:
    value: Any = event.get("time")
    return float(value) if isinstance(value, int | float) else 0.0


STEP = (
    "loss",
    "learning_rate",
    "grad_norm",
    "clip_at",
    "tokens",
    "tokens_per_second",
    "mfu",
    "loss_scale",
    "z_loss",
)
"""Fields of a `step` record that are single numbers."""

PARTS = {"seconds": "seconds", "peak_bytes": "peak", "objective": "objective", "values": "values"}
"""Fields that map names to numbers, with the prefix of the curve's name: `seconds/forward`."""

_NAMES: dict[str, dict[str, str]] = {field: {} for field in PARTS}
"""Cache of the full names of the parts seen so far."""

OTHER_RATES = "learning_rates"
"""Learning rates of parameter groups; drawn where they differ from the run's."""

EVALUATION = ("loss", "ema_loss")


def step_values(event: Event) -> dict[str, float]:
    """Return the numbers of a `step` record, with `step` and `time`; omit missing ones."""
    found = _place_on_branch(event)
    # Fast path for plain floats: there may be a million records.
    for name in STEP:
        value = event.get(name)
        if type(value) is float:
            found[name] = value
        elif value is not None:
            _add(found, name, value)
    for field, names in _NAMES.items():
        parts = event.get(field)
        if type(parts) is dict:
            for name, value in parts.items():
                if value is not None:
                    full = names.get(name) or names.setdefault(name, f"{PARTS[field]}/{name}")
                    _add(found, full, value)
    rates = event.get(OTHER_RATES)
    if isinstance(rates, Mapping):
        for name, value in rates.items():
            if value != event.get("learning_rate"):
                _add(found, f"learning_rate/{name}", value)
    return found


def evaluation_values(event: Event) -> dict[str, float]:
    """Return the numbers of an `evaluation` record, each source's included: `loss/NAME`."""
    found = _place_on_branch(event)
    for name in EVALUATION:
        if event.get(name) is not None:
            _add(found, name, event[name])
    for name, value in _record_items(event.get("sources")):
        _add(found, f"loss/{name}", value)
    for name, value in _record_items(event.get("objective")):
        _add(found, f"objective/{name}", value)
    return found


def _place_on_branch(event: Event) -> dict[str, float]:
    """Return step and time; every record has a time, unless a person has edited it."""
    time = event.get("time")
    return {"step": event["step"], "time": time if isinstance(time, int | float) else 0.0}


def _record_items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()


def _add(found: dict[str, float], name: str, value: Any) -> None:
    """Add a number, or the string that stands for one; ignore values of other types."""
    if type(value) is float:
        found[name] = value
    elif type(value) is int or value in ("NaN", "Infinity", "-Infinity"):
        found[name] = number(value)
