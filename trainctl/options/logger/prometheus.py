"""Prometheus: the newest values as a text file, for node_exporter's textfile collector.

`--collector.textfile.directory` reads `*.prom`; the file is replaced atomically. It has no history:
Prometheus keeps what it scrapes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema.option import option
from trainctl.models.local_path import local_path
from trainctl.options.logger import FollowedRun, Logger, LoggerConfig, Point


@dataclass
class PrometheusConfig(LoggerConfig):
    """Keys of Prometheus."""

    folder: str | None = option(
        None,
        "Directory of `trainctl-ID.prom`, from which the collector reads; none is RUN/prometheus/.",
        example="/var/lib/node_exporter/textfile",
        local=True,
    )


STATES = ("running", "finished", "failed", "stopped")


class TextFile:
    """Sink that writes a run's file, with one gauge per metric.

    Args:
        state: Values of the last commit; None to start again.
    """

    def __init__(self, run: FollowedRun, state: Mapping[str, Any] | None) -> None:
        known = state or {}
        values = known.get("values", {}).items()
        self._values = {name: float(value) for name, value in values}
        self._state: str = known.get("state", "running")
        folder = local_path(run.keys.folder) if run.keys.folder else run.folder
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"trainctl-{run.id}.prom"
        self._labels = f'run="{_escape(run.name)}",id="{run.id}"'

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._state = "running"
            self._values |= {_gauge_name(name): value for name, value in point.values.items()}
            self._values[_gauge_name(f"{point.kind}/step")] = point.step
            self._values[_gauge_name("last_record_seconds")] = point.time

    def go_back(self, step: int) -> None:
        """Do nothing: the next value of a gauge replaces the last."""

    def commit(self) -> Mapping[str, Any]:
        lines = [
            f"# TYPE {name} gauge\n{name}{{{self._labels}}} {_number_text(value)}\n"
            for name, value in self._values.items()
        ]
        lines.append("# TYPE trainctl_state gauge\n")
        lines += [
            f'trainctl_state{{{self._labels},state="{state}"}} {int(state == self._state)}\n'
            for state in STATES
        ]
        whole = self._path.with_suffix(".tmp")  # collectors do not read this ending
        whole.write_text("".join(lines), encoding="utf-8")
        whole.replace(self._path)
        # As text, because JSON has no NaN.
        values = {name: repr(value) for name, value in self._values.items()}
        return {"values": values, "state": self._state}

    def end(self, state: str) -> None:
        self._state = state

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _gauge_name(name: str) -> str:
    """Return the gauge of a metric: `trainctl_train_loss` for `train/loss`."""
    return "trainctl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number_text(value: float) -> str:
    """Return a number in the exposition format, with `NaN`, `+Inf`, `-Inf`."""
    text = repr(float(value))
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text, text)


SPEC = Logger(name="prometheus", keys=PrometheusConfig, build=TextFile)
