"""A folder of runs as a table: their settings, their states, the best one."""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.reading import read_json
from trainctl.errors import TrainctlError
from trainctl.monitor.report.columns import finite_or_none
from trainctl.runs.directory import is_run, last_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import LOST, NEW, RunSummary, summarise_run
from trainctl.runs.records import Event, events_from_end, number, record_files
from trainctl.runs.status import State
from trainctl.runs.sweeps import RECORD, read_sweep

LEAST_SECONDS = 1.0
"""Shortest pause between two looks at the files, however many pages ask."""

MOST_KEYS = 12
"""Most columns of settings, for runs that are not a sweep."""

_TAIL_BYTES = 4 << 20
"""End of the records in which the last step and evaluation are searched."""

_ENDED = (State.finished.value, State.failed.value, State.stopped.value, NEW, LOST)
_KIND = ("objective.kind", "tokenizer.")
_OF_A_MACHINE = ("hardware.", "launcher.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderRow:
    """Row of the table: a run of the folder."""

    id: str
    """Id of the run in the address of its page."""
    name: str
    """Name of its directory."""
    run: RunPaths | None = None
    """The run; None while a sweep has not made it."""
    settings: Mapping[str, str]
    """Values of configuration keys."""
    summary: RunSummary | None = None
    kind: tuple[str, ...] = ()
    """Objective and tokenizer, without which losses do not compare."""
    held_out: float | None = None
    """Loss of its last evaluation, in nats per token; None before the first."""
    tokens_per_second: float | None = None
    """Throughput of its last step."""


class RunsFolder:
    """Table of a folder's runs, which reads only runs whose files have changed.

    Args:
        root: Folder of runs, or of a sweep.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[object, FolderRow]] = {}
        self._rows: list[FolderRow] = []
        self._version, self._looked = 0, -math.inf
        self._document: dict[str, Any] = {}

    def look(self) -> tuple[str, dict[str, Any]]:
        """Return the document of the table, and its version, which changes with the document."""
        with self._lock:
            if time.monotonic() - self._looked > LEAST_SECONDS:
                self._look()
                self._looked = time.monotonic()
            return str(self._version), {**self._document, "version": str(self._version)}

    def runs_of(self, ids: str) -> list[RunPaths]:
        """Return the runs with these comma-separated ids; empty if any of them is unknown."""
        self.look()
        with self._lock:
            runs = {row.id: row.run for row in self._rows}
        found = [runs.get(each) for each in dict.fromkeys(ids.split(","))]
        known = [run for run in found if run is not None]
        return known if len(known) == len(found) else []

    def _look(self) -> None:
        points: Sequence[Mapping[str, str]] = ()
        if (self.root / RECORD).is_file():
            try:
                points = read_sweep(self.root).points
            except TrainctlError:
                points = ()
        rows = [
            self._row(self.root / str(index), values) for index, values in enumerate(points)
        ] or [self._row(path, None) for path in self._folders()]
        found = [row for row in rows if row is not None]
        keys = list(dict.fromkeys(key for point in points for key in point)) or _differing_keys(
            found
        )
        document = _document(self.root, found, keys, is_sweep=bool(points))
        if document != self._document:
            self._document, self._version = document, self._version + 1
        self._rows = found

    def _folders(self) -> list[Path]:
        try:
            return sorted(path for path in self.root.iterdir() if is_run(path))
        except OSError:
            return []

    def _row(self, path: Path, values: Mapping[str, str] | None) -> FolderRow | None:
        """Return the row of a run; None if the directory is no run, or is removed meanwhile."""
        run, name = RunPaths(path), path.name
        signature = (_signature(run), time.monotonic() // 5 if self._may_be_lost(name) else 0)
        known = self._seen.get(name)
        if known is not None and known[0] == signature:
            return known[1]
        row = _read(run, values)
        if row is not None:
            self._seen[name] = (signature, row)
        return row

    def _may_be_lost(self, name: str) -> bool:
        """Return True if the run may end without a change of its files (a killed launcher)."""
        known = self._seen.get(name)
        summary = known[1].summary if known else None
        return summary is not None and summary.state not in _ENDED


def _read(run: RunPaths, values: Mapping[str, str] | None) -> FolderRow | None:
    name = run.root.name
    id = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:10]
    if not is_run(run.root):
        return None if values is None else FolderRow(id=id, name=name, settings=values)
    try:
        summary = summarise_run(run)
        evaluation = next(events_from_end(run.events, "evaluation", most_bytes=_TAIL_BYTES), None)
        step = next(events_from_end(run.events, "step", most_bytes=_TAIL_BYTES), None)
    except TrainctlError:
        return None if values is None else FolderRow(id=id, name=name, settings=values)
    settings = _settings(run)
    return FolderRow(
        id=id,
        name=name,
        run=run,
        settings=values if values is not None else settings,
        kind=tuple(f"{key}={settings[key]}" for key in settings if key.startswith(_KIND)),
        summary=summary,
        held_out=_number_in(evaluation, "loss"),
        tokens_per_second=_number_in(step, "tokens_per_second"),
    )


def _signature(run: RunPaths) -> tuple[object, ...]:
    """Return sizes and times of files, one of which changes whenever the run's row does."""
    found: list[object] = []
    for path in (*record_files(run.events)[-1:], run.events, run.status, run.attempts):
        try:
            about = path.stat()
            found.append((about.st_size, about.st_mtime_ns))
        except OSError:
            found.append(None)
    return tuple(found)


def _settings(run: RunPaths) -> dict[str, str]:
    """Return the configuration of the newest attempt, by key."""
    try:
        plan = read_json(run.attempt(last_attempt(run)).plan)
        config = plan["config"]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    found: dict[str, str] = {}
    waiting = [("", config)]
    while waiting:
        prefix, value = waiting.pop()
        if isinstance(value, dict) and value:
            waiting += [(f"{prefix}.{name}" if prefix else name, value[name]) for name in value]
        elif not prefix.startswith(_OF_A_MACHINE):
            found[prefix] = "derived" if value is None else _shown_settings(value)
    return dict(sorted(found.items()))


def _shown_settings(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _differing_keys(rows: Sequence[FolderRow]) -> list[str]:
    """Return the keys that differ between runs; keys with another value in every run come last."""
    made = [row.settings for row in rows if row.settings]
    counts = {
        key: len({settings.get(key, "not set") for settings in made})
        for key in dict.fromkeys(key for settings in made for key in settings)
    }
    several = [key for key, count in counts.items() if count > 1]
    return sorted(several, key=lambda key: counts[key] == len(made) > 2)[:MOST_KEYS]


def _document(
    root: Path, rows: Sequence[FolderRow], keys: Sequence[str], *, is_sweep: bool
) -> dict[str, Any]:
    measure = (
        "held-out loss" if any(finite_or_none(row.held_out) is not None for row in rows) else "loss"
    )
    is_ranked = len({row.kind for row in rows if row.kind}) < 2
    results = {row.id: _result(row, measure) if is_ranked else None for row in rows}
    finite = {id: result for id, result in results.items() if result is not None}
    return {
        "schema": 1,
        "name": root.name,
        "path": str(root),
        "is_sweep": is_sweep,
        "keys": list(keys),
        "measure": measure,
        "is_ranked": is_ranked,
        "best": min(finite, key=lambda id: finite[id]) if finite else None,
        "runs": [_row_json(row, keys, results[row.id]) for row in rows],
    }


def _row_json(row: FolderRow, keys: Sequence[str], result: float | None) -> dict[str, Any]:
    summary = row.summary
    return {
        "id": row.id,
        "name": row.name,
        "is_made": row.run is not None,
        "values": [row.settings.get(key, "not set") for key in keys],
        "state": summary.shown_state if summary else "not made",
        "message": summary.message if summary else "",
        "step": summary.step if summary else None,
        "total_steps": summary.total_steps or summary.stop_step if summary else None,
        "loss": finite_or_none(summary.loss if summary else None),
        "is_finite": summary is None or summary.loss is None or math.isfinite(summary.loss),
        "held_out": finite_or_none(row.held_out),
        "result": result,
        "tokens_per_second": finite_or_none(row.tokens_per_second),
        "attempt": summary.attempt if summary else None,
        "updated": summary.updated if summary else None,
    }


def _result(row: FolderRow, measure: str) -> float | None:
    if measure == "loss":
        return finite_or_none(row.summary.loss if row.summary else None)
    return finite_or_none(row.held_out)


def _number_in(event: Event | None, name: str) -> float | None:
    try:
        return None if event is None else number(event[name])
    except (KeyError, TypeError, ValueError):
        return None
