"""The report of runs as one JSON document: for the page, `--json` and `--csv`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from trainctl import __version__
from trainctl.config.codec import to_plain
from trainctl.config.literal_secrets import without_secrets
from trainctl.config.reading import read_json
from trainctl.config.schema import walk_leaves
from trainctl.errors import ExitCode, TrainctlError
from trainctl.monitor.report import columns
from trainctl.monitor.report.columns import Edges, GrowingColumns, Numbers, ReducedColumn
from trainctl.monitor.report.history import Branch, History
from trainctl.monitor.report.marks import newest_marks
from trainctl.monitor.report.panels import (
    memory_comparison,
    placement,
    read_profiles,
    time_and_cost_of,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import effective_attempt
from trainctl.runs.directory import open_or_newest, open_run, read_plan, read_record
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise_run
from trainctl.runs.mirror_state import describe_mirror, mirror_text
from trainctl.runs.rollouts import newest_rollouts
from trainctl.runs.sweeps import existing_runs, is_sweep

DOCUMENT_SCHEMA = 1
"""Version of the document."""

BUCKETS = 9000
"""Buckets of all runs of a file together: about 1.5 MB."""
LEAST_BUCKETS = 600
"""Fewest buckets of each run, however many runs there are."""

BRANCHES, BRANCH_BUCKETS = 60, 128
"""Most branches that are drawn, the newest ones, and points of each."""
EVALUATION_BUCKETS = 2000
CALLBACK_BUCKETS = 300
"""Buckets of each curve of a callback, which may have one for each layer."""

MOST_PROOFS = 20

MOST_ROLLOUTS, ROLLOUT_CHARACTERS = 24, 1000
"""Most answers that are shown, those of the newest steps, and the characters of each text."""

CLOSE_TO = ("intervention", "divergence", "failure", "restart", "plateau", "straggler")
"""Kinds of marks around which every step is kept."""

NOT_SERIES = ("step", "time", "attempt", "tokens")

MOST_RUNS = 50
"""More curves cannot be told apart by colour; `trainctl runs ls FOLDER` lists any number."""

PACKAGES = ("trainctl", "torch", "deepspeed", "transformers", "numpy")


def read_histories(runs: Sequence[Path]) -> list[History]:
    """Read runs, and those of sweeps, each once; without any, the newest run.

    Raises:
        TrainctlError: A path is not a run (exit code 5), or there are too many runs (exit code 2).
    """
    opened = [
        run
        for path in runs
        for run in (existing_runs(path) if is_sweep(path) else [open_run(path)])
    ] or [open_or_newest(None)]
    opened = list({run.root: run for run in opened}.values())
    if len(opened) > MOST_RUNS:
        raise TrainctlError(
            f"{len(opened)} runs are too many for one page",
            hint=f"at most {MOST_RUNS}; `trainctl runs ls FOLDER` lists them all",
        )
    histories = [History(run) for run in opened]
    for history in histories:
        history.read()
    return histories


def title_of(histories: Sequence[History]) -> str:
    """Return the names of the runs. Runs of a sweep (0, 1, 2) go by the sweep's name."""
    roots = [history.run.root for history in histories]
    sweeps = {root.parent: None for root in roots if is_sweep(root.parent)}
    others = [root for root in roots if root.parent not in sweeps]
    return ", ".join(path.name for path in (*sweeps, *others))


def report_document(
    histories: Sequence[History],
    *,
    price: float | None = None,
    most: int | None = None,
    is_packed: bool = True,
) -> dict[str, Any]:
    """Return the document of runs, as far as they have been read.

    Args:
        histories: The runs; at least one.
        price: Price of one device for an hour.
        most: Buckets of each run; None takes as many as a file of 2 MB holds, 0 keeps every step.
        is_packed: Columns as text for the page's script; else as lists.

    Raises:
        TrainctlError: A run's `run.json` is damaged (exit code 5).
    """
    if most is None:
        most = max(LEAST_BUCKETS, BUCKETS // len(histories))
    column: Column = columns.pack_column if is_packed else lambda v, **_: columns.plain_numbers(v)
    now = time.time()
    found = [_Run(history, now=now, price=price) for history in histories]
    plans = [run.plan for run in found]
    known = [plan for plan in plans if plan is not None]
    return {
        "schema": DOCUMENT_SCHEMA,
        "version": ".".join(str(history.version) for history in histories),
        "made": now,
        "trainctl": __version__,
        "price": price,
        "runs": [run.to_json(most, column) for run in found],
        "differences": setting_differences(known) if len(known) == len(plans) > 1 else [],
    }


Column = Callable[..., Any]


class _Run:
    def __init__(self, history: History, *, now: float, price: float | None) -> None:
        self._history = history
        self.record = read_record(history.run)
        self.summary: RunSummary = summarise_run(history.run)
        self._standing = effective_attempt(history.run).number
        self.plan = self._plan_of(self._standing)
        self._now, self._price = now, price

    def _compared(self) -> list[str]:
        """Return objective and tokenizer of the run, without which losses do not compare."""
        if self.plan is None:
            return []
        config = self.plan.config
        return [config.objective.kind, *map(str, to_plain(config.tokenizer).values())]

    def to_json(self, most: int, column: Column) -> dict[str, Any]:
        history, summary = self._history, self.summary
        steps = history.steps
        at = columns.bucket_edges(len(steps), most or max(1, len(steps)), self._rows_to_look_at())
        account = time_and_cost_of(
            history,
            stop_step=summary.stop_step,
            now=self._now if summary.holder is not None else None,
            price=self._price,
        )
        marks, left_out = newest_marks(history.marks)
        start = history.start or {}
        return {
            "name": history.run.root.name,
            "path": str(history.run.root),
            "id": self.record["id"],
            "state": summary.shown_state,
            "is_live": summary.is_live,
            "message": summary.message,
            "missing_records": summary.missing_records,
            "mirror": self._mirror(),
            "created": summary.created,
            "updated": summary.updated,
            "attempt": summary.attempt,
            "launcher": summary.launcher,
            "host": summary.host,
            "compared": "; ".join(self._compared()),
            "step": history.last_step,
            "stop_step": summary.stop_step,
            "total_steps": self.plan.total_steps if self.plan else None,
            "num_parameters": start.get("num_parameters"),
            "num_trained": start.get("num_trained"),
            "unigram_entropy": start.get("unigram_entropy"),
            "model": self.plan.config.model.name if self.plan else "",
            "recipe": (self.plan.config.recipe or "") if self.plan else "",
            "clip_at": (self.plan.config.optimizer.gradient_clipping if self.plan else None)
            or None,
            "steps_read": len(steps),
            "axes": _axes(steps, at, column),
            "series": {
                name: _series(columns.reduce_columns(_drawn(steps, name), at), column)
                for name in steps.names
                if name not in NOT_SERIES
            },
            **self._other_curves(column),
            "marks": [mark.to_json() for mark in marks],
            "marks_left_out": left_out,
            "memory": memory_comparison(self.plan, history.memory),
            "layout": self._layout(),
            "proofs": read_proofs(history.run),
            "rollouts": _rollouts(history.run),
            "profiles": read_profiles(history.run),
            "account": account,
            "attempts": self._attempts(),
            "derived": [
                {"key": item.key, "value": str(item.value), "reason": item.reason}
                for item in (self.plan.derived if self.plan else ())
            ],
            "provenance": self._provenance(),
        }

    def _other_curves(self, column: Column) -> dict[str, Any]:
        """Return the curves of evaluations, of callbacks, and of steps that do not count."""
        history, evaluations = self._history, self._history.evaluations
        curves = _curves(evaluations, EVALUATION_BUCKETS, column)
        callbacks = history.callbacks.values()
        return {
            "evaluations": {**curves, "best": _best(evaluations)},
            "callbacks": [_curves(each, CALLBACK_BUCKETS, column) for each in callbacks],
            "branches": [_branch(branch, column) for branch in history.branches[-BRANCHES:]],
            "branches_left_out": max(0, len(history.branches) - BRANCHES),
        }

    def _mirror(self) -> str:
        """Return what the run's mirror has, what waits and why; empty without a mirror."""
        if self.plan is None:
            return ""
        found = describe_mirror(self._history.run, self.plan.config.checkpoint)
        problem = f": {found['problem']}" if found is not None and found["problem"] else ""
        return "" if found is None else mirror_text(found) + problem

    def _plan_of(self, number: int) -> RunPlan | None:
        """Return the plan of an attempt; None if there is none that this version can read."""
        try:
            return read_plan(self._history.run.attempt(number).plan)
        except TrainctlError:
            return None

    def _rows_to_look_at(self) -> list[int]:
        """Return the rows of marks around which every step is kept, the newest first."""
        steps = self._history.steps
        marks = [mark for mark in reversed(self._history.marks) if mark.kind in CLOSE_TO]
        return [steps.lower_bound("step", mark.step) for mark in marks if len(steps)]

    def _layout(self) -> dict[str, Any] | None:
        if self.plan is None:
            return None
        return placement(self.plan, self._history.run.attempt(self._standing))

    def _attempts(self) -> dict[str, Any]:
        known = {number: self._plan_of(number) for number in sorted(self._history.attempts)}
        plans = {number: plan for number, plan in known.items() if plan is not None}
        return {
            "numbers": list(plans),
            "differences": setting_differences(list(plans.values())) if len(plans) > 1 else [],
        }

    def _provenance(self) -> dict[str, Any]:
        record = self.record
        packages = record.get("packages") or {}
        git = record.get("git") or {}
        return {
            "argv": list(record.get("argv") or ()),
            "git": {name: git.get(name) for name in ("revision", "changed") if name in git},
            "packages": {name: packages[name] for name in PACKAGES if name in packages},
        }


def read_proofs(run: RunPaths) -> list[dict[str, Any]]:
    """Return the newest results of `trainctl prove`, oldest first; damaged files are left out."""
    names = (path.stem for path in run.proofs.glob("*.json"))
    numbers = sorted(int(name) for name in names if name.isdecimal())
    found = []
    for number in numbers[-MOST_PROOFS:]:
        with suppress(OSError, ValueError, TypeError, KeyError):
            proof = read_json(run.proofs / f"{number}.json")
            texts = {name: str(proof[name]) for name in ("verdict", "sentence")}
            changes = " ".join(map(str, [*proof["changes"], *proof["versions"]]))
            is_good = proof["exit_code"] == ExitCode.success
            found.append(
                {"step": int(proof["checkpoint"]), "changes": changes, "is_good": is_good, **texts}
            )
    return found


def _rollouts(run: RunPaths) -> list[dict[str, Any]]:
    """Return the newest sampled answers, with their texts cut; empty for most runs."""
    found = []
    for each in newest_rollouts(run, MOST_ROLLOUTS):
        with suppress(AttributeError, KeyError, TypeError):
            texts = {name: each[name][:ROLLOUT_CHARACTERS] for name in ("prompt", "answer")}
            numbers = {name: each[name] for name in ("step", "reward", "advantage", "is_finished")}
            found.append({**numbers, **texts, "rewards": dict(each["rewards"].items())})
            found[-1]["failed"] = list(each.get("failed", ()))
    return found


def _drawn(steps: GrowingColumns, name: str) -> Numbers:
    """Return a field; a part that only some steps have (a save) took no time in the others."""
    values = steps[name]
    if name.startswith("seconds/"):
        values[np.isnan(values) & np.isfinite(steps["seconds/total"])] = 0.0
    return values


def _axes(steps: GrowingColumns, at: Edges, column: Column) -> dict[str, Any]:
    """Return the axes to draw curves over, at the last step of each bucket: ascending."""
    hours = np.cumsum(np.nan_to_num(steps["seconds/total"])) / 3600
    first, last = steps["step"][at], columns.last_of(steps["step"], at)
    return {
        "first_step": column(first, exactly=True),
        "step": column(last, exactly=True),
        "tokens": column(columns.last_of(steps["tokens"], at), exactly=True),
        "hours": column(columns.last_of(hours, at), exactly=True),
    }


def _series(found: ReducedColumn, column: Column) -> dict[str, Any]:
    """Return the columns of a curve; exact buckets need no minimum and maximum."""
    if found.is_exact:
        return {"mean": column(found.mean), "min": None, "max": None}
    return {"mean": column(found.mean), "min": column(found.min), "max": column(found.max)}


def _curves(found: GrowingColumns, most: int, column: Column) -> dict[str, Any]:
    """Return the curves of all fields over the steps, in `most` buckets."""
    at = columns.bucket_edges(len(found), most)
    names = [name for name in found.names if name not in ("step", "time")]
    return {
        "step": column(columns.last_of(found["step"], at), exactly=True),
        "series": {
            name: _series(columns.reduce_columns(found[name], at), column) for name in names
        },
    }


def _best(found: GrowingColumns) -> dict[str, float] | None:
    losses = found["loss"]
    if not np.isfinite(losses).any():
        return None
    row = int(np.nanargmin(np.where(np.isfinite(losses), losses, np.nan)))
    last = losses[np.isfinite(losses)][-1]
    return {"loss": float(losses[row]), "step": int(found["step"][row]), "last": float(last)}


def _branch(branch: Branch, column: Column) -> dict[str, Any]:
    steps = branch.steps
    at = columns.bucket_edges(len(steps), BRANCH_BUCKETS)
    names = [name for name in ("loss", "grad_norm", "tokens_per_second") if name in steps]
    return {
        "attempt": branch.attempt,
        "steps": len(steps),
        "step": column(columns.last_of(steps["step"], at), exactly=True),
        "series": {name: column(columns.reduce_columns(steps[name], at).mean) for name in names},
    }


def report_rows(document: dict[str, Any]) -> Iterator[list[Any]]:
    """Yield the curves of an unpacked document as a table: its header, then a row per bucket."""
    names = dict.fromkeys(name for run in document["runs"] for name in run["series"])
    heads = ["run", "first_step", "last_step", "tokens", "hours"]
    yield [*heads, *(f"{name}_{part}" for name in names for part in _PARTS)]
    for run in document["runs"]:
        axes, series = run["axes"], run["series"]
        for row, step in enumerate(axes["step"]):
            yield [
                run["name"],
                *(int(value) for value in (axes["first_step"][row], step)),
                axes["tokens"][row],
                axes["hours"][row],
                *(_cell_value(series.get(name), part, row) for name in names for part in _PARTS),
            ]


_PARTS = ("mean", "min", "max")


def _cell_value(series: dict[str, Any] | None, part: str, row: int) -> Any:
    if series is None:
        return None
    column = series[part] if series[part] is not None else series["mean"]
    return column[row]


ABSENT = "not set"


def setting_differences(plans: Sequence[RunPlan]) -> list[dict[str, Any]]:
    """Return each key that differs in meaning between plans, with its values as text.

    A null means the value that is derived for it.
    """
    sides = [_Side(plan) for plan in plans]
    keys = dict.fromkeys(key for side in sides for key in side.values)  # keys depend on kinds
    found = []
    for key in keys:
        meanings = [repr(side.meaning(key)) for side in sides]
        if len(set(meanings)) > 1:
            found.append({"key": key, "values": [side.shown(key) for side in sides]})
    return found


class _Side:
    def __init__(self, plan: RunPlan) -> None:
        config = without_secrets(plan.config)
        self.values = {key: to_plain(value) for key, _, value in walk_leaves(config)}
        self._derived = {item.key: to_plain(item.value) for item in plan.derived}

    def meaning(self, key: str) -> Any:
        value = self.values.get(key)
        return self._derived.get(key) if value is None else value

    def shown(self, key: str) -> str:
        if key not in self.values:
            return ABSENT
        value, derived = self.values[key], self._derived.get(key)
        if value is None:
            return "none" if derived is None else f"{derived} (derived)"
        return str(value)
