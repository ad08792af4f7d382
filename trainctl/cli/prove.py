"""`trainctl prove`, `trainctl trial` and `trainctl data suspects`: steps of a run, computed again.

They are replayed with a change, on other devices, or without some documents.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, open_run_or_newest
from trainctl.cli.console import (
    Meter,
    print_data,
    print_json,
    print_message,
    print_table,
    print_warning,
    to_printable,
)
from trainctl.config.overrides import split_target
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import SINGLE_SOURCE

if TYPE_CHECKING:
    from trainctl.launchers.migration_proof import MigrationProof
    from trainctl.launchers.prove import Proof
    from trainctl.launchers.replay import ReplayResult
    from trainctl.launchers.suspects import SuspectDocument, Suspects
    from trainctl.launchers.trial import Trial


Result = TypeVar("Result", bound="ReplayResult")

Steps = Annotated[
    int, typer.Option(metavar="K", help="Number of steps to replay; with --from, of logged losses.")
]
AtCheckpoint = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Checkpoint after N steps; default: the newest with K steps left."
    ),
]
OtherPython = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Python of another environment, which makes the second replay."
    ),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="DIR",
        help="Folder of another trainer: replay from its checkpoint what it logged.",
    ),
]
Losses = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="With --from: the log, a .csv of step,loss; default: trainer_state.json.",
    ),
]


def prove(
    run: TargetAndOverrides = None,
    steps: Steps = 2,
    checkpoint: AtCheckpoint = None,
    python: OtherPython = None,
    directory: From = None,
    losses: Losses = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Replay steps of a run with a change, and name the first tensor that differs.

    The run is the newest, if none is named. The verdict is: equal bit for bit, within rounding, or
    the first tensor that differs (exit code 6). Rounding is measured by a replay with other orders
    of sums.

    With --from, logged losses of another trainer are compared with those of the same steps here,
    made by the recipe or run that is named.

    Example: trainctl prove runs/NAME parallelism.tensor=2 zero_stage=1
    """
    if directory is not None:
        if checkpoint is not None or python is not None:
            raise TrainctlError(
                "--checkpoint and --python are of a run's own replays, not of --from",
                hint="name the folder of one checkpoint: --from DIR/checkpoint-500",
            )
        _prove_migration(directory, run or [], losses, steps, config_dir, as_json)
        return
    if losses is not None:
        raise TrainctlError("--losses is of another trainer", hint="add --from DIR")
    target, changes = split_target(run)
    proof = api.prove(
        open_run_or_newest(target),
        *changes,
        steps=steps,
        checkpoint=checkpoint,
        python=python,
        say=print_message,
        config_dir=config_dir,
    )
    end_with_result(proof, show_proof, as_json=as_json)


def end_with_result(result: Result, show: Callable[[Result], None], *, as_json: bool) -> None:
    """Print the result of a replay, and end with its exit code."""
    if as_json:
        print_json(result.to_dict())
    else:
        show(result)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def _prove_migration(
    directory: Path,
    overrides: list[str],
    losses: Path | None,
    steps: int,
    config_dir: Path | None,
    as_json: bool,
) -> None:
    """Compare logged losses of another trainer, and end with the verdict's exit code."""
    with Meter() as meter:
        proof = api.prove_migration(
            directory,
            *overrides,
            losses=losses,
            steps=steps,
            say=print_message,
            progress=meter,
            config_dir=config_dir,
        )
    end_with_result(proof, show_migration_proof, as_json=as_json)


def show_migration_proof(proof: MigrationProof) -> None:
    """Print each loss beside the logged one, then the verdict and what explains a difference."""
    for note in proof.notes:
        print_message(f"note: {note}")
    rows = []
    for each in proof.steps:
        steps = f"{each.last:,}" if each.first == each.last else f"{each.first:,}-{each.last:,}"
        pairs = [each.learning_rates, each.grad_norms]
        cells = ["-" if pair is None else f"{pair[0]:.4g}/{pair[1]:.4g}" for pair in pairs]
        losses = [f"{each.logged:.6f}", f"{each.replayed:.6f}", f"{each.difference:.1e}"]
        rows.append([steps, *losses, f"{each.allowed:.1e}", *cells, each.verdict.value])
    heads = ("steps", "logged", "here", "difference", "allowed", "rate", "norm", "verdict")
    print_table(heads, rows, right=tuple(range(7)), wraps=False)
    for reason in proof.reasons:
        print_data(reason)
    print_data(f"{proof.sentence} ({proof.format} checkpoint {proof.source})")


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


SuspectStep = Annotated[int, typer.Option("--step", metavar="N", min=1, help="The step, from 1.")]


def trial(
    run: TargetAndOverrides = None,
    *,
    step: SuspectStep,
    devices: Annotated[
        int, typer.Option(metavar="K", min=1, help="Number of devices that compute each share.")
    ] = 3,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Compute a step of a run again on other devices, and name a device that differs.

    The run (the newest, if none is named) is replayed beside it from the checkpoint before the
    step. Then each share of the step's batch is computed on K devices, and its loss and its
    gradients are compared bit for bit, before they are added to those of other ranks. Exit code 6:
    a device differs, or the run recorded another loss.

    Example: trainctl trial runs/NAME --step 1200
    """
    target, overrides = split_target(run)
    found = api.trial(
        open_run_or_newest(target),
        *overrides,
        step=step,
        devices=devices,
        say=print_message,
        config_dir=config_dir,
    )
    end_with_result(found, show_trial, as_json=as_json)


def show_trial(found: Trial) -> None:
    """Print the recorded and the replayed loss of each step, the verdict, and the override."""
    rows = [
        (f"{each.step:,}", f"{each.recorded:.9g}", f"{each.replayed:.9g}") for each in found.record
    ]
    print_table(("step", "recorded loss", "replayed"), rows, right=(0, 1, 2), wraps=False)
    print_data(to_printable(found.sentence))
    if found.override:
        print_data(f"to leave it out: {to_printable(found.override)}")
    if found.file:
        print_message(f"result: {found.file}")


def suspects(
    run: TargetAndOverrides = None,
    *,
    step: SuspectStep,
    by: Annotated[
        Literal["loss", "grad_norm"] | None,
        typer.Option(help="What has the spike; default: what stands out more in the records."),
    ] = None,
    most: Annotated[
        int, typer.Option(metavar="K", min=1, help="Maximum number of documents to name.")
    ] = 8,
    force: Annotated[
        bool, typer.Option("--force", help="Search where the value stands out little, too.")
    ] = False,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Name the documents that carry the spike of a step.

    The run (the newest, if none is named) is replayed beside it from the checkpoint before the
    step. Then the step's loss or gradient norm is computed again and again with halves of its batch
    left out; all of that is one launch. Exit code 6: no document explains the spike.

    Example: trainctl data suspects runs/NAME --step 1200
    """
    target, overrides = split_target(run)
    found = api.suspects(
        open_run_or_newest(target),
        *overrides,
        step=step,
        by=by,
        most=most,
        force=force,
        say=print_message,
        config_dir=config_dir,
    )
    end_with_result(found, show_suspects, as_json=as_json)


def show_suspects(found: Suspects) -> None:
    """Print each document with its share of the spike, then the result."""
    for each in found.documents:
        share = "not finite by it alone" if each.share is None else f"{each.share:.0%} of the spike"
        print_data(f"{_place(each)}: {share}")
        print_data(f"  | {to_printable(' '.join(each.text.split()))}")
    print_data(found.sentence)
    if found.file:
        print_message(f"result: {found.file}")


def _place(found: SuspectDocument) -> str:
    of = "" if found.source == SINGLE_SOURCE else f" of {found.source}"
    line = "" if found.line is None else f":{found.line}"
    where = "" if found.file is None else f" ({to_printable(found.file)}{line})"
    tokens = f"tokens {found.start:,} to {found.end:,}"
    return f"document {found.document:,}{of}, {tokens}, sample {found.sample:,}{where}"
