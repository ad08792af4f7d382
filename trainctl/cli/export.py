"""`trainctl export`: a checkpoint as a transformers directory."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import Best, Json, NamedRun, Step, Weights, WhichWeights
from trainctl.cli.checkpoint_selection import choose_checkpoint
from trainctl.cli.console import print_json, put, say, short_count, size_text
from trainctl.cli.meter import Meter
from trainctl.cli.offline import require_new, run_offline
from trainctl.config.quantities import in_unit
from trainctl.config.store import load_config
from trainctl.errors import TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.runs.directory import open_run


class ExportType(StrEnum):
    """Number format of the exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def export(
    run: NamedRun,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.")],
    step: Step = None,
    best: Best = False,
    dtype: Annotated[
        ExportType | None,
        typer.Option(
            help="Format of the weights; else the one that the run trains in.", show_default=False
        ),
    ] = None,
    weights: WhichWeights = Weights.raw,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="The adapter alone, as PEFT loads it.")
    ] = False,
    merge: Annotated[
        bool,
        typer.Option("--merge", help="The adapter in its base, as is done without either."),
    ] = False,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Largest file of weights, such as 2GB; else 5GB.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a directory that transformers loads.

    Of an adapter: merged into its base, or alone as PEFT's directory.

    Example: trainctl export runs/NAME exported --dtype bf16
    """
    paths = open_run(run)
    shard_bytes = _shard_bytes(shard_size)
    if adapter and (merge or shard_size):
        raise TrainctlError(f"--adapter with {'--merge' if merge else '--shard-size'}: choose one")
    if (adapter or merge) and low_rank(load_config(paths.config).adapter) is None:
        raise TrainctlError(
            f"{paths.root} has no adapter: its checkpoints hold the model's own weights",
            hint="leave the option out",
        )
    require_new(out)
    with Meter() as meter:
        checkpoint = choose_checkpoint(paths, meter, step=step, best=best)
        arguments: list[str | Path] = [paths.root, checkpoint, out, "--weights", weights.value]
        if dtype is not None:
            arguments += ["--dtype", dtype.value]
        arguments += ["--adapter"] if adapter else []
        arguments += ["--shard-bytes", str(shard_bytes)] if shard_bytes else []
        result = run_offline("export", arguments, meter)
    if as_json:
        where = {"run": str(paths.root), "checkpoint": checkpoint.name, "weights": weights.value}
        print_json({"schema": 1, **where, **result})
        return
    for note in result["notes"]:
        say(f"note: {note}")
    average = " (average of the weights)" if weights is Weights.ema else ""
    put(
        f"exported {checkpoint.name}{average} to {out}: "
        f"{short_count(result['parameters'])} parameters, "
        f"{size_text(result['bytes'])} of {result['dtype']}"
    )


def _shard_bytes(text: str | None) -> int | None:
    """Parse the size of the largest file into bytes; None without `--shard-size`."""
    if text is None:
        return None
    size = in_unit(text, "bytes", is_count=True)
    if size is None or size < 1:
        raise TrainctlError(f"--shard-size {text} is no size", hint="--shard-size 2GB")
    return int(size)
