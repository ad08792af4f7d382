"""Weights & Biases: one W&B run per run, or one per branch.

W&B takes no step twice, and none below its last. So if a run goes back and its steps come out
differently, the whole curve is sent to a new W&B run of the same group, and the previous one is
tagged `superseded`. Offline, no server can be asked for the last step, and `wandb sync` renumbers
folders that begin below the end of another. So one folder is written, from the start, when the run
ends.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainctl.config.schema.option import option
from trainctl.options.logger import FollowedRun, Logger, LoggerConfig, Point
from trainctl.options.logger._tracker import Tracker

SUPERSEDED = "superseded"


class Mode(Enum):
    """Whether metrics go to W&B's server during the run."""

    online = "online"
    offline = "offline"


@dataclass
class WandbConfig(LoggerConfig):
    """Keys of W&B. Credentials come from `wandb login` or WANDB_API_KEY, the server from
    WANDB_BASE_URL.
    """

    mode: Mode = option(
        Mode.online,
        "online sends metrics during the run; offline writes RUN/wandb/ at its end, for `wandb "
        "sync`.",
    )
    project: str = option("trainctl", "Name of the W&B project.")
    entity: str | None = option(
        None, "W&B user or team; none is the default of the logged-in user."
    )
    group: str | None = option(
        None, "W&B group of the run and its branches; none is the run's name."
    )
    tags: list[str] = option([], "Tags of the W&B run.", example="[ablation,125m]")


def build(run: FollowedRun, state: Mapping[str, Any] | None) -> Any:
    """Return the sink of a run."""
    if "offline" in (run.keys.mode.value, os.environ.get("WANDB_MODE")):
        return OfflineFolder(run)
    return Tracker(run, state, OnlineClient(run))


def _init_run(run: FollowedRun, identity: str, mode: Mode, **more: Any) -> Any:
    """Start a W&B run, without the facts that W&B collects about the sending process."""
    import wandb

    keys = run.keys
    return wandb.init(
        project=keys.project,
        entity=keys.entity,
        id=identity,
        name=run.name,
        group=keys.group or run.name,
        tags=keys.tags,
        config=dict(run.about),
        mode=mode.value,
        dir=run.folder.parent,  # W&B adds a folder `wandb`
        settings=wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            quiet=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
        ),
        **more,
    )


def _log(run: Any, followed: FollowedRun, point: Point) -> None:
    """Log a point to a W&B run, with the tables that belong to it."""
    import wandb

    tables = {
        name: wandb.Table(columns=[*table[0]], data=[[*row.values()] for row in table])
        for name, table in followed.tables(point).items()
    }
    run.log({**point.values, **tables}, step=point.step)


def _exit_code(state: str) -> int:
    return int(state == "failed")


class OnlineClient:
    """Client of W&B's server (`_tracker.Client`)."""

    def __init__(self, run: FollowedRun) -> None:
        self._followed, self._last = run, -1
        self._run: Any = None

    def begin(self, branch: int) -> int | None:
        return self.open(branch)

    def open(self, branch: int) -> int | None:
        self.close()
        self._run = run = _init_run(
            self._followed, self._identity(branch), Mode.online, resume="allow"
        )
        self._last = run.step - 1
        return self._last

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step > self._last:
                _log(self._run, self._followed, point)

    def give_up(self, branch: int) -> None:
        import wandb

        keys = self._followed.keys
        path = "/".join(filter(None, (keys.entity, keys.project, self._identity(branch))))
        old = wandb.Api().run(path)
        old.tags = [*old.tags, SUPERSEDED]
        old.update()

    def flush(self) -> None:
        """Do nothing: W&B's service sends by itself, and the next `open` finds what was lost."""

    def end(self, state: str) -> None:
        self._run.summary["state"] = state
        self._run.finish(exit_code=_exit_code(state))
        self._run = None

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _identity(self, branch: int) -> str:
        return f"{self._followed.id}-{branch}" if branch else self._followed.id


class OfflineFolder:
    """Sink that writes a folder for `wandb sync` when the run ends, and nothing before."""

    def __init__(self, run: FollowedRun) -> None:
        self._run = run
        self._points = 0

    def write(self, points: Sequence[Point]) -> None:
        """Do nothing: `end` reads all points again."""

    def go_back(self, step: int) -> None:
        """Do nothing: `end` reads all points again."""

    def commit(self) -> Mapping[str, Any]:
        return {}

    def end(self, state: str) -> None:
        identity = self._run.id
        for folder in _offline_folders(self._run.folder, identity):
            if any(folder.glob("*.wandb.synced")):  # the server has it and takes no step twice
                identity = f"{self._run.id}-{folder.name.split('-')[2]}"
            else:
                shutil.rmtree(folder)
        run = _init_run(self._run, identity, Mode.offline)
        for point in self._run.curve(_ALL):
            _log(run, self._run, point)
        run.summary["state"] = state
        run.finish(exit_code=_exit_code(state))

    def close(self) -> None:
        """Do nothing: no file stays open."""


_ALL = 1 << 62


def _offline_folders(folder: Path, identity: str) -> list[Path]:
    """Return the folders written for a run, the first one first: `offline-run-DATE_TIME-ID`."""
    return sorted(folder.glob(f"offline-run-*-{identity}*"))


SPEC = Logger(name="wandb", keys=WandbConfig, build=build, modules=("wandb",))
