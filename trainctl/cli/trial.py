"""`trainctl trial` and `trainctl data suspects`: a step on other devices, or without documents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, open_run_or_newest
from trainctl.cli.console import print_data, print_message, print_table, to_printable
from trainctl.cli.prove import end_with_result
from trainctl.config.overrides import split_target
from trainctl.plans.mixture import SINGLE_SOURCE

if TYPE_CHECKING:
    from trainctl.launchers.suspects import SuspectDocument, Suspects
    from trainctl.launchers.trial import Trial

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
