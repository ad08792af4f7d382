"""`trainctl evaluate`: held-out loss of a checkpoint, or published tasks on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl.cli.arguments import Best, Json, OnDevice, Run, Step, WhichWeights, open_run_or_newest
from trainctl.cli.console import Meter, print_data, print_json, print_table, print_warning
from trainctl.errors import TrainctlError
from trainctl.launchers.offline import require_harness
from trainctl.runs.records import number

_COUNTS = ("samples", "shots")


Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B", help="Evaluate these lm-eval tasks on an export of the checkpoint instead."
    ),
]
SampleCount = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Number of held-out samples (default: the run's), or of examples of each task "
        "(default: all).",
    ),
]
FewShotExamples = Annotated[
    int | None, typer.Option(min=0, help="Number of few-shot examples; default: the task's own.")
]


def evaluate(
    run: Run = None,
    step: Step = None,
    best: Best = False,
    samples: SampleCount = None,
    tasks: Tasks = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of your own tasks in lm-eval's YAML, in addition to its tasks.",
        ),
    ] = None,
    shots: FewShotExamples = None,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Batch size of tasks; default: the run's micro-batch size."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Apply the tokenizer's chat template to the questions of tasks."
        ),
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the exported model that the tasks are evaluated on."
        ),
    ] = None,
    weights: WhichWeights = "raw",
    device: OnDevice = "auto",
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on held-out text, or on tasks.

    The text is what the run holds out; the tasks are lm-eval's.

    Examples: trainctl evaluate; trainctl evaluate runs/NAME --best --samples 512;
    trainctl evaluate runs/NAME --tasks arc_easy,hellaswag
    """
    of_tasks = {
        "--include-path": include_path,
        "--shots": shots,
        "--batch-size": batch_size,
        "--chat": chat or None,
        "--keep": keep,
    }
    wrong = [name for name, value in of_tasks.items() if tasks is None and value is not None]
    if wrong:
        raise TrainctlError(f"{wrong[0]} is of tasks", hint="name them: --tasks A,B")
    if tasks is not None:
        require_harness()
    chosen = open_run_or_newest(run).checkpoint(step, best=best, warn=print_warning)
    with Meter() as meter:
        if tasks is None:
            result = chosen.evaluate(
                samples=samples, weights=weights, device=device, progress=meter
            )
        else:
            result = chosen.evaluate_tasks(
                *task_names(tasks),
                weights=weights,
                device=device,
                progress=meter,
                include=include_path,
                shots=shots,
                samples=samples,
                batch_size=batch_size,
                chat=chat,
                keep=keep,
            )
    if as_json:
        print_json({"schema": 1, **result})
    elif tasks is None:
        _show_loss(result)
    else:
        _show_tasks(result)


def task_names(text: str) -> tuple[str, ...]:
    """Split comma-separated names of tasks, without repetitions.

    Raises:
        TrainctlError: There is no name.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise TrainctlError("--tasks names no task", hint="--tasks arc_easy,hellaswag")
    return names


def _show_loss(result: dict[str, Any]) -> None:
    average = ", average of the weights" if result["weights"] == "ema" else ""
    notes = [f"{name} {value:.4f}" for name, value in result.get("objective", {}).items()]
    if "unigram_entropy" in result:
        entropy = f"unigram entropy {result['unigram_entropy']:.4f}"
        notes = [f"perplexity {math.exp(result['loss']):,.2f}", entropy]
    print_data(
        f"{result['checkpoint']}{average}: held-out loss {result['loss']:.4f} over "
        f"{result['samples']:,} samples" + (f" ({'; '.join(notes)})" if notes else "")
    )
    for name, loss in result.get("sources", {}).items():
        print_data(f"  {name}: {loss:.4f}")


def _show_tasks(result: dict[str, Any]) -> None:
    rows = []
    for row in result["results"]:
        metric = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        error = "-" if row["stderr"] is None else f"{number(row['stderr']):.4f}"
        cells = (row["task"], metric, f"{number(row['value']):.4f}", error)
        rows.append((*cells, *("-" if row[key] is None else f"{row[key]:,}" for key in _COUNTS)))
    print_data(f"{result['checkpoint']}, by lm-eval {result['lm_eval']}")
    heads = ("task", "metric", "value", "stderr", *_COUNTS)
    print_table(heads, rows, right=(2, 3, 4, 5), wraps=False)
