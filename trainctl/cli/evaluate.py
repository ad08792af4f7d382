"""`trainctl evaluate`: the held-out loss of a checkpoint."""

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
from trainctl.cli.console import print_json, put
from trainctl.cli.intact import choose_checkpoint, open_or_newest
from trainctl.cli.meter import Meter
from trainctl.cli.offline import run_offline


def evaluate(
    run: Run = None,
    step: Step = None,
    best: Best = False,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Held-out samples; else the run's own number.",
            show_default=False,
        ),
    ] = None,
    weights: WhichWeights = Weights.raw,
    device: OnDevice = OfflineDevice.auto,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint on the run's held-out text.

    Examples: trainctl evaluate; trainctl evaluate runs/NAME --best --samples 512
    """
    paths = open_or_newest(run)
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
