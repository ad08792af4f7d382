"""MLflow: one MLflow run per run, in a database or on a server.

MLflow keeps every value that a step ever had, and shows the highest step's value as the latest. So
if a run goes back and its steps come out differently, the whole curve is sent to a new MLflow run,
and the previous one is deleted (MLflow can restore it until `mlflow gc`).
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.codec import flatten
from trainctl.config.schema.option import option
from trainctl.options.logger import FollowedRun, Logger, LoggerConfig, Point, markdown
from trainctl.options.logger._tracker import Tracker

RUN_TAG, BRANCH_TAG = "trainctl.run_id", "trainctl.branch"

_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED"}
_METRICS_AT_ONCE, _PARAMETERS_AT_ONCE, _PARAMETER_LENGTH = 1000, 100, 6000
_NAME_LENGTH = 240
"""Limits of MLflow's interface."""


@dataclass
class MlflowConfig(LoggerConfig):
    """Keys of MLflow. Credentials are in MLFLOW_TRACKING_USERNAME and similar variables."""

    tracking_uri: str | None = option(
        None,
        "MLflow tracking server or database; none is MLFLOW_TRACKING_URI, else `mlflow.db` in "
        "the folder of runs.",
        example="http://mlflow:5000",
    )
    experiment: str = option(
        "trainctl", "Name of the MLflow experiment; created if it does not exist."
    )
    tags: dict[str, str] = option({}, "Tags of the MLflow run.", example="{team: speech}")


def build(run: FollowedRun, state: Mapping[str, Any] | None) -> Tracker:
    """Return the sink of a run."""
    return Tracker(run, state, Server(run))


class Server:
    """Client of an MLflow server or database (`_tracker.Client`)."""

    def __init__(self, run: FollowedRun) -> None:
        from mlflow import MlflowClient

        uri, runs = (
            run.keys.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"),
            run.folder.parents[1],
        )
        self._client = MlflowClient(uri or f"sqlite:///{runs / 'mlflow.db'}")
        # MLflow's default for a database is a folder where the process stands.
        self._artifacts = None if uri else (runs / "mlflow-artifacts").absolute().as_uri()
        self._followed = run
        self._experiment = self._experiment_of(run.keys.experiment)
        self._run = ""

    def begin(self, branch: int) -> int | None:
        if branch == 0:
            for old in self._runs():
                self._client.delete_run(old.info.run_id)
        return self.open(branch)

    def open(self, branch: int) -> int | None:
        found = self._runs(branch)
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            self._log_facts(found[0].data.params)
            return None
        tags = {RUN_TAG: self._followed.id, BRANCH_TAG: str(branch), **self._followed.keys.tags}
        created = self._followed.about["run"]["created"]
        made = self._client.create_run(
            self._experiment, int(created * 1000), tags, run_name=self._followed.name
        )
        self._run = made.info.run_id
        self._log_facts({})
        return None

    def send(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(mlflow_name(name), value, int(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for some in _in_parts(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=some)
        for point in points:
            for name, table in self._followed.tables(point).items():
                file = f"{mlflow_name(name)}/step-{point.step:08d}.md"
                self._client.log_text(self._run, markdown(table), file)

    def give_up(self, branch: int) -> None:
        for old in self._runs(branch):
            self._client.delete_run(old.info.run_id)

    def flush(self) -> None:
        """Do nothing: a batch has arrived when its call returns."""

    def end(self, state: str) -> None:
        self._client.set_tag(self._run, "trainctl.state", state)
        if state in _STATES:
            self._client.set_terminated(self._run, _STATES[state])

    def close(self) -> None:
        """Do nothing: there is no connection of its own."""

    def _experiment_of(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name, self._artifacts))
            except MlflowException:  # another run created it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _runs(self, branch: int | None = None) -> list[Any]:
        """Return the MLflow runs of the run, or of one of its branches, that are not deleted."""
        which = f"tags.`{RUN_TAG}` = '{self._followed.id}'"
        if branch is not None:
            which += f" and tags.`{BRANCH_TAG}` = '{branch}'"
        return list(self._client.search_runs([self._experiment], which))

    def _log_facts(self, logged: Mapping[str, str]) -> None:
        """Log what is known of the run as parameters. A resume may change it, and parameters are
        fixed: changes are tags.

        Args:
            logged: Parameters that MLflow has, not all if their sender was killed.
        """
        from mlflow.entities import Param

        facts = flatten(self._followed.about)
        texts = {mlflow_name(name): str(value)[:_PARAMETER_LENGTH] for name, value in facts}
        missing = [Param(name, text) for name, text in texts.items() if name not in logged]
        for some in _in_parts(missing, _PARAMETERS_AT_ONCE):
            self._client.log_batch(self._run, params=some)
        for name in logged.keys() & texts.keys():
            if logged[name] != texts[name]:
                self._client.set_tag(self._run, f"changed.{name}", texts[name])


def mlflow_name(name: str) -> str:
    """Return a name in MLflow's syntax: a relative path of words, at most `_NAME_LENGTH` long."""
    return posixpath.normpath(re.sub(r"[^\w.\- :/]", "_", f"/{name}")).strip("/")[:_NAME_LENGTH]


def _in_parts(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), size):
        yield items[begin : begin + size]


SPEC = Logger(name="mlflow", keys=MlflowConfig, build=build, modules=("mlflow",))
