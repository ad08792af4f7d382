"""Reads a run's records in order and hands their metrics to one logger, each step once.

After each batch the logger commits, then the cursor is replaced. A process killed in between reads
the same batch again, with the logger's state from before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.literal_secrets import without_secrets
from trainctl.config.registry import function_of, load_spec
from trainctl.errors import TrainctlError
from trainctl.memory.budget import budget
from trainctl.monitor.loggers.delivery import Cursor, read_cursor, read_on
from trainctl.monitor.loggers.points import CurveReader, curve
from trainctl.options.logger import (
    FollowedRun,
    Point,
    Sink,
    SinkWithEnd,
    Table,
    missing_modules_finding,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of, effective_attempt
from trainctl.runs.directory import read_plan, read_record, run_id
from trainctl.runs.files import ensure_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event
from trainctl.runs.rollouts import read_rollouts, reward_texts, rollouts_file
from trainctl.runs.status import State, read_status


class Follower:
    """Sends a run's records from the cursor on to one logger. Makes its sink with the first batch.

    Raises:
        TrainctlError: Its cursor is damaged.
    """

    def __init__(self, run: RunPaths, name: str) -> None:
        self._run, self._name = run, name
        self._path = run.companion(name).cursor
        self._sink: Sink | None = None
        self.cursor = read_cursor(self._path)

    def send(self) -> bool:
        """Send the next batch of records, and return True if there was one.

        Raises:
            Exception: Any error of the logger, or of writing the cursor. Nothing of the batch
                counts as sent then.
        """
        cursor = self.cursor
        records = self._run.events
        if not records.exists():
            return False
        events, position, digest = read_on(records, cursor)
        if position == cursor.position:
            return False
        if self._sink is None:
            self._sink = self._build(cursor.state)
        after = self._pass_on(events, self._sink)
        state = dict(self._sink.commit())
        after = after.moved(position, digest, state=state, problem="")
        after.write(self._path)
        self.cursor = after
        return True

    def end(self) -> None:
        """Tell the sink that it has everything, and the run's state.

        Raises:
            Exception: Any error of the logger, or of writing the cursor.
        """
        cursor, status = self.cursor, read_status(self._run)
        told = f"{cursor.position.size} {status.updated if status else 0}"
        if cursor.state is None or cursor.ended == told:
            return
        if self._sink is None:
            self._sink = self._build(cursor.state)
        if isinstance(self._sink, SinkWithEnd):
            self._sink.end(status.state.value if status else State.running.value)
        self.cursor = replace(cursor, state=dict(self._sink.commit()), ended=told, problem="")
        self.cursor.write(self._path)

    def give_up(self, problem: str) -> None:
        """Close the failed sink, and write the problem to the cursor.

        Raises:
            OSError: The disk is full.
        """
        self.close()
        if problem != self.cursor.problem:
            self.cursor = replace(self.cursor, problem=problem)
            self.cursor.write(self._path)

    def close(self) -> None:
        """Close the sink."""
        sink, self._sink = self._sink, None
        if sink is not None:
            with suppress(Exception):  # everything that matters was committed
                sink.close()

    def _build(self, state: Mapping[str, Any] | None) -> Sink:
        run, lacking = self._run, missing_modules_finding(load_spec("logger", self._name))
        if lacking is not None:
            raise TrainctlError(lacking.message, hint=lacking.hint)
        folder = run.root / self._name
        ensure_folder(folder)
        config = config_of(run)
        followed = FollowedRun(
            folder=folder,
            id=run_id(run),
            name=run.root.name,
            keys=getattr(config.logging, self._name, None),
            config=config,
            about=run_facts(run),
            curve=partial(curve, run.events),
            tables=partial(tables, run),
        )
        sink: Sink = function_of("logger", self._name)(followed, state)
        return sink

    def _pass_on(self, events: list[Event], sink: Sink) -> Cursor:
        """Hand the metrics of records to the sink, and return the cursor after them."""
        before = self.cursor
        reading = CurveReader(before.attempt, before.step, before.points)
        waiting: list[Point] = []
        for point, goes_back in reading.points_of(events):
            if goes_back:
                sink.write(waiting)
                waiting = []
                sink.go_back(point.step)
            waiting.append(point)
        sink.write(waiting)
        return Cursor(
            attempt=reading.attempt, step=reading.step, points=reading.points, ended=before.ended
        )


ANSWERS, CHARACTERS = 4, 2000
"""Most sampled answers of a step that loggers get, and most characters of a text."""


def tables(run: RunPaths, point: Point) -> dict[str, Table]:
    """Return the sampled answers of a step with their rewards (`objective=grpo`), if it has any."""
    if point.kind != "train" or not rollouts_file(run, point.step).is_file():
        return {}
    with suppress(TrainctlError, AttributeError, KeyError, TypeError):  # damaged
        found = read_rollouts(run, point.step)[:ANSWERS]
        rows = [
            {
                "prompt": each["prompt"][:CHARACTERS],
                "answer": each["answer"][:CHARACTERS],
                "reward": _number(each["reward"]),
                "rewards": ", ".join(f"{k} {text}" for k, text in reward_texts(each).items()),
                "advantage": _number(each["advantage"]),
            }
            for each in found
        ]
        return {"train/answers": rows} if rows else {}
    return {}


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


_OF_THE_RECORD = ("id", "name", "created", "argv", "git")
_PACKAGES = ("trainctl", "torch", "deepspeed", "transformers")


def run_facts(run: RunPaths) -> dict[str, Any]:
    """Return the facts as plain JSON, with references in place of secrets.

    Raises:
        TrainctlError: Files of the run are damaged (exit code 5).
    """
    record = read_record(run)
    origin = {name: record.get(name) for name in _OF_THE_RECORD}
    versions = record.get("packages") or {}
    origin["packages"] = {name: versions[name] for name in _PACKAGES if name in versions}
    known: dict[str, Any] = {"run": origin}
    known["config"] = to_plain(without_secrets(config_of(run)))
    number = effective_attempt(run).number
    if number == 0:
        return known
    plan = read_plan(run.attempt(number).plan)
    known["plan"] = {
        "attempt": number,
        "total_steps": plan.total_steps,
        "stop_step": plan.stop_step,
        "warmup_steps": plan.warmup_steps,
        "devices": plan.mesh.world_size,
        "nodes": plan.hardware.nodes,
        "accelerator": plan.hardware.accelerator.value,
        "mesh": asdict(plan.mesh),
        "batch": asdict(plan.batch),
    }
    return {**known, "memory": _memory(plan)}


def _memory(plan: RunPlan) -> dict[str, int]:
    """Return the predicted peak of the fullest device; empty if that needs a trace of the model."""
    try:
        if plan.config.model.needs_trace:
            return {}
        found = budget(plan)
    except TrainctlError:
        return {}
    return {
        "device_peak_bytes": found.device_peak_bytes,
        "device_peak_low_bytes": found.device_peak_low_bytes,
        "device_peak_high_bytes": found.device_peak_high_bytes,
    }
