"""`trainctl evaluate --tasks`: published tasks on a checkpoint's model, by lm-eval."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainctl.cli.console import print_json, print_table, put, say
from trainctl.cli.meter import Meter
from trainctl.cli.offline import require_new, run_offline
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.attempts import standing_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, number

_COUNTS = ("samples", "shots")


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks to evaluate and their settings; the fields are options of `trainctl evaluate`."""

    names: tuple[str, ...]
    include: Path | None
    shots: int | None
    samples: int | None
    batch_size: int | None
    chat: bool
    keep: Path | None


def require_harness() -> None:
    """Refuse to begin without lm-eval.

    Raises:
        TrainctlError: lm-eval is not installed (exit code 4).
    """
    if find_spec("lm_eval") is None:
        raise TrainctlError(
            "--tasks needs a package that is missing (lm_eval)",
            hint="pip install 'trainctl[tasks]'",
            exit_code=ExitCode.environment,
        )


def names_of(text: str) -> tuple[str, ...]:
    """Split comma-separated names of tasks, without repetitions.

    Raises:
        TrainctlError: There is no name.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise TrainctlError("--tasks names no task", hint="--tasks arc_easy,hellaswag")
    return names


def evaluate_tasks(
    run: RunPaths,
    checkpoint: Path,
    tasks: Tasks,
    *,
    weights: str,
    device: str,
    meter: Meter,
) -> dict[str, Any]:
    """Evaluate the tasks in a subprocess, append the results to the run's records, and return them.

    Raises:
        TrainctlError: The folder of tasks does not exist, the folder to keep is not empty, or the
            evaluation failed.
    """
    if tasks.include is not None and not tasks.include.is_dir():
        raise TrainctlError(f"--include-path {tasks.include} is no folder")
    if tasks.keep is not None:
        require_new(tasks.keep)
    arguments: list[str | Path] = [run.root, checkpoint, "--weights", weights, "--device", device]
    for name in tasks.names:
        arguments.append(f"--name={name}")
    for option, value in (
        ("include", tasks.include.resolve() if tasks.include else None),
        ("keep", tasks.keep.resolve() if tasks.keep else None),
        ("shots", tasks.shots),
        ("limit", tasks.samples),
        ("batch-size", tasks.batch_size),
    ):
        if value is not None:
            arguments.append(f"--{option}={value}")
    arguments += ["--chat"] if tasks.chat else []
    found = run_offline("tasks", arguments, meter)
    record = {
        "checkpoint": checkpoint.name,
        "weights": weights,
        "chat": tasks.chat,
        **found,
    }
    try:
        with EventWriter(run.events, standing_attempt(run).number) as writer:
            writer.write("tasks", **record)
    except OSError as error:  # another user's run, which is read-only
        say(f"warning: not added to the run's records: {error.strerror}", style="warning")
    return record


def show(run: RunPaths, record: dict[str, Any], *, as_json: bool) -> None:
    """Print the results as a table or JSON."""
    if as_json:
        print_json({"schema": 1, "run": str(run.root), **record})
        return
    rows = []
    for row in record["results"]:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        error = "-" if row["stderr"] is None else f"{number(row['stderr']):.4f}"
        cells = (row["task"], metric, f"{number(row['value']):.4f}", error)
        rows.append((*cells, *("-" if row[key] is None else f"{row[key]:,}" for key in _COUNTS)))
    put(f"{record['checkpoint']}, by lm-eval {record['lm_eval']}")
    heads = ("task", "metric", "value", "stderr", *_COUNTS)
    print_table(heads, rows, right=(2, 3, 4, 5), wraps=False)
