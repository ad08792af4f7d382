"""`trainctl prove`: replay steps of a run with a change, and name the first tensor that differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides
from trainctl.cli.console import print_data, print_json, print_message, print_table, print_warning
from trainctl.config.overrides import split_target

if TYPE_CHECKING:
    from trainctl.launchers.prove import Proof


def prove(
    run: TargetAndOverrides = None,
    steps: Annotated[int, typer.Option(metavar="K", help="Number of steps to replay.")] = 2,
    checkpoint: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Checkpoint after N steps; default: the newest with K steps left.",
            show_default=False,
        ),
    ] = None,
    python: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Python of another environment, which makes the second replay.",
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Replay steps of a run with a change, and name the first tensor that differs.

    The run is the newest, if none is named. The verdict is: equal bit for bit, within rounding, or
    the first tensor that differs (exit code 6). Rounding is measured by a replay with other orders
    of sums.

    Example: trainctl prove runs/NAME parallelism.tensor=2 zero_stage=1
    """
    target, changes = split_target(run)
    proof = api.prove(
        api.Run(target) if target is not None else api.Run.newest(),
        *changes,
        steps=steps,
        checkpoint=checkpoint,
        python=python,
        say=print_message,
        config_dir=config_dir,
    )
    if as_json:
        print_json(proof.to_dict())
    else:
        show_proof(proof)
    if proof.exit_code:
        raise typer.Exit(proof.exit_code)


def show_proof(proof: Proof) -> None:
    """Print the verdict, after what the run's own records say, and a table of the steps."""
    for name, (was, now) in proof.versions.items():
        print_data(f"{name} {was} against {now}")
    for each in proof.record:
        if not each.is_reproduced:
            print_warning(
                f"the run does not reproduce itself: step {each.step:,} has the loss "
                f"{each.replayed!r} when it is replayed as recorded, and had {each.recorded!r}"
            )
    if proof.reproduces:
        steps = ", ".join(str(each.step) for each in proof.record)
        print_data(f"the replay as recorded has the run's own losses (step {steps})")
    kinds = ("forward", "loss", "gradient", "update")
    rows = []
    for step in proof.steps:
        found = [step.differences.get(kind) for kind in kinds]
        cells = ["-" if each is None else f"{each.size:.2g}/{each.expected:.2g}" for each in found]
        rows.append([f"{step.step:,}", f"{step.loss:.6f}", f"{step.changed_loss:.6f}", *cells])
    print_table(("step", "loss", "changed", *kinds), rows, right=tuple(range(7)), wraps=False)
    print_data("largest relative difference / rounding expected there")
    print_data(proof.sentence)
    if proof.file:
        print_message(f"result: {proof.file}")
