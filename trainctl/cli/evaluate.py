"""`trainctl evaluate`: held-out loss of a checkpoint, or published tasks on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import (
    Best,
    Json,
    OfflineDevice,
    OnDevice,
    Run,
    Step,
    Weights,
    WhichWeights,
)
from trainctl.cli.checkpoint_selection import choose_checkpoint, open_or_newest
from trainctl.cli.console import print_json, put
from trainctl.cli.evaluate_tasks import (
    Tasks,
    evaluate_tasks,
    names_of,
    require_harness,
    show,
)
from trainctl.cli.meter import Meter
from trainctl.cli.offline import run_offline
from trainctl.errors import TrainctlError


def evaluate(
    run: Run = None,
    step: Step = None,
    best: Best = False,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Held-out samples, else the run's own number; examples of each task, else all.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Tasks of lm-eval instead, on an export of the checkpoint.",
            show_default=False,
        ),
    ] = None,
    include_path: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Tasks of your own, in lm-eval's YAML, beside its own.",
            show_default=False,
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Examples before each question of a task; else the task's own number.",
            show_default=False,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of tasks at a time; else the run's micro-batch.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Questions of tasks by the tokenizer's chat template.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Keep the export that tasks are done with.", show_default=False
        ),
    ] = None,
    weights: WhichWeights = Weights.raw,
    device: OnDevice = OfflineDevice.auto,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on held-out text, or on tasks.

    The text is what the run holds out; the tasks are lm-eval's.

    Examples: trainctl evaluate; trainctl evaluate runs/NAME --best --samples 512;
    trainctl evaluate runs/NAME --tasks arc_easy,hellaswag
    """
    if tasks is None:
        of_tasks = {
            "--include-path": include_path,
            "--shots": shots,
            "--batch-size": batch_size,
            "--chat": chat or None,
            "--keep": keep,
        }
        for name, value in of_tasks.items():
            if value is not None:
                raise TrainctlError(f"{name} is of tasks", hint="name them: --tasks A,B")
    else:
        require_harness()
    paths = open_or_newest(run)
    if tasks is not None:
        how = Tasks(names_of(tasks), include_path, shots, samples, batch_size, chat, keep)
        with Meter() as meter:
            checkpoint = choose_checkpoint(paths, meter, step=step, best=best)
            record = evaluate_tasks(
                paths, checkpoint, how, weights=weights.value, device=device.value, meter=meter
            )
        show(paths, record, as_json=as_json)
        return
    with Meter() as meter:
        checkpoint = choose_checkpoint(paths, meter, step=step, best=best)
        arguments: list[str | Path] = [paths.root, checkpoint, "--device", device.value]
        arguments += ["--weights", weights.value]
        if samples is not None:
            arguments += ["--samples", str(samples)]
        result = run_offline("evaluate", arguments, meter)
    if as_json:
        where = {"run": str(paths.root), "checkpoint": checkpoint.name, "weights": weights.value}
        print_json({"schema": 1, **where, **result})
        return
    loss = result["loss"]
    average = ", average of the weights" if weights is Weights.ema else ""
    beside = [f"{name} {value:.4f}" for name, value in result.get("objective", {}).items()]
    if "unigram_entropy" in result:
        entropy = f"unigram entropy {result['unigram_entropy']:.4f}"
        beside = [f"perplexity {math.exp(loss):,.2f}", entropy]
    put(
        f"{checkpoint.name}{average}: held-out loss {loss:.4f} over {result['samples']:,} samples"
        + (f" ({'; '.join(beside)})" if beside else "")
    )
    for name, of_source in result.get("sources", {}).items():
        put(f"  {name}: {of_source:.4f}")
