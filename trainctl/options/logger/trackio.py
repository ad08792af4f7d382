"""Trackio: one run of it for a run, in its local database; `trackio sync` brings that to a Space.

It keeps what a step had before, too. So when a run went back and came out otherwise, its run is
deleted and sent again under the same name. Trackio's pins clash with those of others: it may need
an environment of its own (`logging.python`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.logger import Followed, Logger, LoggerConfig, Point
from trainctl.options.logger._tracker import Tracker, flat


@dataclass
class TrackioConfig(LoggerConfig):
    """Its own keys."""

    project: str = option("trainctl", "The project.")
    folder: str | None = option(
        None,
        "Where its databases lie; none is TRACKIO_DIR, else Trackio's own folder in the cache.",
        example="runs/trackio",
        local=True,
    )


SPEC = Logger(
    name="trackio",
    keys=TrackioConfig,
    build="trainctl.options.logger.trackio:build",
    extra="trackio",
    modules=("trackio",),
)


def build(run: Followed, state: Mapping[str, Any] | None) -> Tracker:
    """Return the sink of a run."""
    if run.keys.folder is not None:  # read when it is imported
        os.environ["TRACKIO_DIR"] = str(Path(run.keys.folder).expanduser().absolute())
    return Tracker(run, state, Database(run))


class Database:
    """A tracker (`_tracker.Client`).

    `trackio.log` hands points to a thread and gives them the time at which they come; the storage
    below it takes their own, and leaves out those that it has, by an id.
    """

    def __init__(self, run: Followed) -> None:
        from trackio.sqlite_storage import SQLiteStorage

        self._storage, self._run = SQLiteStorage, run
        self._project = run.keys.project
        self._about = dict(flat(run.about))
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
        """It was deleted when the other was begun."""

    def flush(self) -> None:
        """What was sent is in the database when its call returns."""

    def end(self, state: str) -> None:
        newest = self._newest or next(iter(self._run.curve(1)), None)
        if newest is not None:  # the configuration goes with a point
            self._log([newest], {**self._about, "state": state})

    def close(self) -> None:
        """The storage opens and closes it each time."""

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
