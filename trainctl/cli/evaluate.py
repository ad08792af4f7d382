"""`trainctl evaluate` and `trainctl sample`: what a checkpoint scores, and what it says.

`evaluate` gives the held-out loss or published tasks; `sample` continues a text, answers a message,
or scores texts.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl import api
from trainctl.cli.arguments import (
    Best,
    Json,
    NamedRun,
    OnDevice,
    Run,
    Step,
    WhichWeights,
    open_run_or_newest,
)
from trainctl.cli.console import (
    Meter,
    print_data,
    print_json,
    print_table,
    print_warning,
    to_printable,
)
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


AsChat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put TEXT into the chat template as a user's message, and answers as the assistant's; "
        "default: if the run's data are messages.",
    ),
]

Answers = Annotated[
    list[str] | None,
    typer.Option(
        "--answer", help="Print the score of this answer to TEXT; may be given several times."
    ),
]
AsScore = Annotated[
    bool, typer.Option("--score", help="Print what a reward model or a classifier says of TEXT.")
]


def sample(
    run: NamedRun,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Prompt, or the user's message.")],
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 128,
    temperature: Annotated[
        float,
        typer.Option(min=0, help="Sampling temperature; 0 always takes the most likely token."),
    ] = 0.8,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the sampling; default: training.seed.")
    ] = None,
    chat: AsChat = None,
    system: Annotated[
        str | None, typer.Option(help="System message before the user's message.")
    ] = None,
    answers: Answers = None,
    score: AsScore = False,
    step: Step = None,
    best: Best = False,
    weights: WhichWeights = "raw",
    device: OnDevice = "auto",
    as_json: Json = False,
) -> None:
    """Continue a text, or answer a message, by a checkpoint.

    Of conversations the answer alone is printed, up to the end of its turn. Reward models and
    classifiers print scores.

    Examples: trainctl sample runs/NAME "def main" --tokens 64;
    trainctl sample runs/NAME "say hello" --chat --temperature 0;
    trainctl sample runs/NAME "1+1=" --answer 2 --answer 3
    """
    with Meter() as meter:
        checkpoint = api.Run(run).checkpoint(step, best=best, warn=print_warning)
        how: dict[str, Any] = {"weights": weights, "device": device, "progress": meter}
        if score or answers:
            result = checkpoint.score(text, *(answers or ()), chat=chat, **how)
        else:
            result = checkpoint.sample(
                text,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                chat=chat,
                system=system,
                **how,
            )
    if as_json:
        print_json({"schema": 1, **result})
        return
    for each in result.get("scored", ()):
        for name, value in each["scores"].items():
            print_data(f"{value:10.4f}  {to_printable(name)}  {to_printable(each['text'])}")
    for line in result.get("text", "").splitlines():
        print_data(to_printable(line))
