"""Trackio: one Trackio run per run, in its local database; `trackio sync` copies it to a Space.

Trackio keeps earlier values of a step too. So if a run goes back and its steps come out
differently, its Trackio run is deleted and sent again under the same name. Trackio's pinned
dependencies conflict with others, so it may need an environment of its own (`logging.python`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from trainctl.config.codec import flatten
from trainctl.config.schema.option import option
from trainctl.models.local_path import local_path
from trainctl.options.logger import FollowedRun, Logger, LoggerConfig, Point
from trainctl.options.logger._tracker import Tracker


@dataclass
class TrackioConfig(LoggerConfig):
    """Keys of Trackio."""

    project: str = option("trainctl", "Name of the Trackio project.")
    folder: str | None = option(
        None,
        "Directory of Trackio's databases; none is TRACKIO_DIR, else Trackio's own cache "
        "directory.",
        example="runs/trackio",
        local=True,
    )


def build(run: FollowedRun, state: Mapping[str, Any] | None) -> Tracker:
    """Return the sink of a run."""
    if run.keys.folder is not None:  # Trackio reads the variable on import
        os.environ["TRACKIO_DIR"] = str(local_path(run.keys.folder).absolute())
    return Tracker(run, state, Database(run))


class Database:
    """Client of Trackio's database (`_tracker.Client`).

    `trackio.log` passes points to a thread, which stamps them with the current time. The storage
    below it takes the points' own times, and skips points that it has, by an id.
    """

    def __init__(self, run: FollowedRun) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._run = SQLiteStorage, run
        self._project = run.keys.project
        self._about = dict(flatten(run.about))
        self._branch = 0
        self._newest: Point | None = None

    def begin(self, branch: int) -> int | None:
        self._storage.delete_run(self._project, self._run.name, run_id=self._run.id)
        return self.open(branch)

    def open(self, branch: int) -> int | None:
        self._branch = branch
        return None

    def send(self, points: Sequence[Point]) -> None:
        if points:
            self._newest = points[-1]
            self._log(points, self._about)

    def give_up(self, branch: int) -> None:
        """Do nothing: the previous branch was deleted when the new one began."""

    def flush(self) -> None:
        """Do nothing: points are in the database when the call that sends them returns."""

    def end(self, state: str) -> None:
        newest = self._newest or next(iter(self._run.curve(1)), None)
        if newest is not None:  # the configuration is sent with a point
            self._log([newest], {**self._about, "state": state})

    def close(self) -> None:
        """Do nothing: the storage opens and closes the database on each call."""

    def _log(self, points: Sequence[Point], about: Mapping[str, Any]) -> None:
        self._storage.bulk_log(
            self._project,
            self._run.name,
            [dict(point.values) for point in points],
            steps=[point.step for point in points],
            timestamps=[datetime.fromtimestamp(point.time, UTC).isoformat() for point in points],
            config=dict(about),
            log_ids=[f"{self._run.id}-{self._branch}-{point.number}" for point in points],
            run_id=self._run.id,
        )


SPEC = Logger(name="trackio", keys=TrackioConfig, build=build, modules=("trackio",))
