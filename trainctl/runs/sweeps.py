"""The folder of a sweep: `sweep.json`, and the runs `0`, `1`, ... beside it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import number, read_events

SWEEP_SCHEMA = 1
"""Version of `sweep.json`."""
RECORD = "sweep.json"
DEFAULT_ROOT = Path("sweeps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What `sweep.json` holds.

    Attributes:
        created: Unix seconds.
        overrides: As typed.
        points: The swept keys of each run and its values, by its index.
    """

    created: float
    overrides: tuple[str, ...]
    points: tuple[dict[str, str], ...]
    schema: int = SWEEP_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run of a sweep stands.

    Attributes:
        index: Its number.
        values: Its values of the swept keys.
        summary: Of its directory; None while that is not made.
        held_out_loss: Of the newest evaluation, nats a token.
    """

    index: int
    values: dict[str, str]
    summary: RunSummary | None
    held_out_loss: float | None


def new_sweep(folder: Path | None, overrides: Sequence[str], points: Sequence[Any]) -> Path:
    """Make the folder of a sweep.

    Args:
        folder: The folder; None makes one under `sweeps/`.
        overrides: As typed.
        points: Values of each run.

    Raises:
        TrainctlError: It holds something already (exit code 5).
    """
    if folder is None:
        recipe = next((text for text in overrides if text.startswith("recipe=")), "sweep")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.partition("=")[2] or recipe)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        folder = DEFAULT_ROOT / f"{name.strip('-.') or 'sweep'}-{stamp}"
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise TrainctlError(
            f"cannot make the sweep's folder: {error}", exit_code=ExitCode.run_state
        ) from None
    if taken:
        raise TrainctlError(
            f"{folder} is not empty: it holds {', '.join(taken[:3])}",
            hint="name a new folder; `trainctl sweep FOLDER` shows one that is there",
            exit_code=ExitCode.run_state,
        )
    sweep = Sweep(
        created=time.time(), overrides=tuple(redact_argv(overrides)), points=tuple(points)
    )
    write_json(folder / RECORD, to_plain(sweep))
    return folder


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder.

    Raises:
        TrainctlError: There is none (exit code 5).
    """
    try:
        return from_plain(Sweep, read_json(folder / RECORD))
    except (OSError, ValueError, TypeError) as error:
        raise TrainctlError(
            f"{folder} is no sweep: {error}",
            hint="trainctl sweep recipe=NAME KEY=1,2 makes one",
            exit_code=ExitCode.run_state,
        ) from None


def results(folder: Path) -> list[Result]:
    """How the runs of a sweep stand, by index."""
    found = []
    for index, values in enumerate(read_sweep(folder).points):
        run = RunPaths((folder / str(index)).resolve())
        try:
            summary = summarise(run)
        except TrainctlError:
            summary = None
        found.append(
            Result(index=index, values=values, summary=summary, held_out_loss=_held_out_loss(run))
        )
    return found


def _held_out_loss(run: RunPaths) -> float | None:
    losses = [event["loss"] for event in read_events(run.events, "evaluation")]
    return number(losses[-1]) if losses else None
