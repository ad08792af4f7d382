"""Losses that another trainer logged: Trainer's `trainer_state.json`, or a CSV of step and loss."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainctl.errors import RunStateError, TrainctlError

STATE = "trainer_state.json"
"""Trainer's file, also of Axolotl and LLaMA-Factory: in each checkpoint, with all steps before."""

_STEP_FOLDER = re.compile(r"(?:checkpoint-|global_step|iter_|step-?)(\d+)")
"""Names of folders of one step: Trainer's, DeepSpeed's, Megatron's, torchtitan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedLoss:
    """Mean loss over the steps [first, last]."""

    first: int
    last: int
    loss: float
    rounding: float
    """Half a unit of the last digit that was printed."""
    learning_rate: float | None = None
    """Learning rate of the last step, or in older versions of Trainer of the step after it."""
    grad_norm: float | None = None
    """Gradient norm of the last step."""


def read_logged_losses(path: Path) -> list[LoggedLoss]:
    """Return the losses in a log, by step.

    Args:
        path: A `trainer_state.json`, where a loss is the mean since the one before; or a CSV whose
            first line names its columns: `step` and `loss`, and if it has them `learning_rate`,
            `grad_norm`, and `first_step` of losses that are means up to `step`.

    Raises:
        TrainctlError: The file cannot be read, or has no losses.
    """
    try:
        text = path.read_text(encoding="utf-8")
        rows = _csv_rows(text) if path.suffix == ".csv" else _state_rows(text)
        return _with_windows(sorted(rows, key=lambda row: int(row["step"])), path)
    except OSError as error:
        raise _unusable(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, InvalidOperation) as error:
        raise _unusable(path, f"is no log of losses ({error!r})") from None


def _unusable(path: Path, why: str) -> TrainctlError:
    return RunStateError(
        f"{path} {why}",
        hint="a trainer_state.json, or a .csv with the columns step,loss",
    )


def _csv_rows(text: str) -> list[Mapping[str, Any]]:
    rows = [
        {name.strip(): Decimal(value.strip()) for name, value in row.items() if value}
        for row in csv.DictReader(text.splitlines())
    ]
    return [{"first_step": row["step"], **row} for row in rows]


def _state_rows(text: str) -> list[Mapping[str, Any]]:
    history = json.loads(text, parse_float=Decimal)["log_history"]
    return [entry for entry in history if "loss" in entry and "step" in entry]


def _with_windows(rows: Iterable[Mapping[str, Any]], path: Path) -> list[LoggedLoss]:
    """Return the rows, each with the steps that its loss is the mean of.

    A step that was logged twice, as after a resume, counts as it was logged last.
    """
    by_step = {int(row["step"]): row for row in rows}
    found = []
    for before, step in pairwise([0, *by_step]):
        row = by_step[step]
        loss = Decimal(row["loss"])
        decimals = -int(loss.as_tuple().exponent) if loss.is_finite() else 0
        found.append(
            LoggedLoss(
                first=int(row.get("first_step", before + 1)),
                last=step,
                loss=float(loss),
                rounding=0.5 * 10.0**-decimals if decimals > 0 else 0.0,
                learning_rate=_number(row.get("learning_rate")),
                grad_norm=_number(row.get("grad_norm")),
            )
        )
    if not found:
        raise _unusable(path, "has no losses")
    return found


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCheckpoint:
    """A checkpoint of another trainer, and the losses it logged."""

    path: Path
    step: int | None
    """Step of the checkpoint by its name; None if the name has none."""
    log: Path
    losses: list[LoggedLoss]

    def after(self, step: int) -> list[LoggedLoss]:
        """Return the losses whose steps all come after a step."""
        return [each for each in self.losses if each.first > step]


def find_logged_checkpoint(directory: Path, log: Path | None, wanted: int) -> LoggedCheckpoint:
    """Return the newest checkpoint after which enough losses were logged, else the most of them.

    Args:
        directory: The folder that a trainer saved in, or that of one checkpoint.
        log: The log; None looks for the longest `trainer_state.json`.
        wanted: Number of losses.

    Raises:
        TrainctlError: There is no log, or no loss after any checkpoint (exit code 5).
    """
    if not directory.is_dir():
        raise TrainctlError(f"{directory} is no directory")
    name = _STEP_FOLDER.fullmatch(directory.name)
    folders = {int(name[1]): directory} if name else _step_folders(directory)
    log = log or _longest_log(directory if name is None else directory.parent, directory)
    losses = read_logged_losses(log)
    if not folders:
        return LoggedCheckpoint(path=directory, step=None, log=log, losses=losses)
    usable = {
        step: sum(each.first > step for each in losses)
        for step in folders
        if losses[-1].first > step
    }
    if not usable:
        steps = ", ".join(map(str, sorted(folders)))
        raise no_loss_after(
            log, losses, f"the checkpoint{'s' * (len(folders) > 1)} of step {steps}"
        )
    step = max(usable, key=lambda step: (min(usable[step], wanted), step))
    return LoggedCheckpoint(path=folders[step], step=step, log=log, losses=losses)


def no_loss_after(log: Path, losses: list[LoggedLoss], what: str) -> TrainctlError:
    """Return the error that a log ends too early to compare a replay with."""
    return RunStateError(
        f"{log} has no loss of steps that all come after {what}: its last is of step "
        f"{losses[-1].last}",
        hint="losses before a checkpoint cannot be replayed from it: name an earlier checkpoint, "
        "or a later log with --losses FILE",
    )


def _step_folders(directory: Path) -> dict[int, Path]:
    found = ((_STEP_FOLDER.fullmatch(path.name), path) for path in directory.iterdir())
    return {int(name[1]): path for name, path in found if name is not None and path.is_dir()}


def _longest_log(parent: Path, directory: Path) -> Path:
    """Return the `trainer_state.json` that goes on longest.

    Raises:
        TrainctlError: There is none.
    """
    known = {directory / STATE, parent / STATE, *parent.glob(f"*/{STATE}")}
    logs = [path for path in sorted(known) if path.is_file()]
    if not logs:
        raise RunStateError(
            f"no {STATE} is in {directory}",
            hint="--losses FILE names a log: a .csv with the columns step,loss",
        )
    return max(logs, key=lambda path: _global_step(path))


def _global_step(path: Path) -> int:
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1
