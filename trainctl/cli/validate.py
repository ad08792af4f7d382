"""`trainctl validate`: every problem of a configuration or of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides
from trainctl.cli.console import (
    findings_to_json,
    print_data,
    print_json,
    print_message,
    show_findings,
)
from trainctl.errors import TrainctlError
from trainctl.monitor.plan_text import plan_name

DeepSpeedFile = Annotated[
    Path | None,
    typer.Option("--deepspeed", metavar="FILE", help="Check this DeepSpeed JSON file instead."),
]
WorldSize = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="With --deepspeed: world size.")
]
ModelDirectory = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="DIR", help="With --deepspeed: transformers directory of the model."
    ),
]


def validate(
    overrides: TargetAndOverrides = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
    deepspeed: DeepSpeedFile = None,
    world_size: WorldSize = None,
    model: ModelDirectory = None,
) -> None:
    """Report every problem of a configuration, or of a DeepSpeed JSON, at once.

    Examples: trainctl validate recipe=70b-zero3-nodes;
    trainctl validate --deepspeed ds_config.json --world-size 8
    """
    if deepspeed is not None:
        _validate_file(deepspeed, overrides or [], world_size, model, as_json)
        return
    if world_size is not None or model is not None:
        raise TrainctlError(
            "--world-size and --model go with --deepspeed FILE",
            hint="without it, hardware=... and model=... say them",
        )
    try:
        made = api.plan(*(overrides or ()), config_dir=config_dir, files=True).details
        findings, not_yet = made.findings, made.plan.not_yet
    except TrainctlError as error:
        if not as_json:
            raise
        findings, not_yet = error.findings, ()
    errors = [finding for finding in findings if finding.is_error]
    if as_json:
        report = {"schema": 1, "valid": not errors, "findings": findings_to_json(findings)}
        print_json(report | {"not_yet": list(not_yet)})
        raise typer.Exit(errors[0].exit_code if errors else 0)
    if errors:
        raise TrainctlError.from_findings(findings)
    show_findings(findings)
    for technique in not_yet:
        print_message(f"note: {technique}", style="warning")
    print_data(f"{plan_name(made.plan)} is valid on {made.hardware.name}")


def _validate_file(
    path: Path, overrides: list[str], world_size: int | None, model: Path | None, as_json: bool
) -> None:
    checked = api.check_deepspeed(path, *overrides, world_size=world_size, model=model)
    version = checked.schema.deepspeed
    if as_json:
        report = {"schema": 1, "valid": not checked.has_error, "deepspeed": version}
        print_json(report | {"findings": findings_to_json(checked.findings)})
        raise typer.Exit(2 if checked.has_error else 0)
    if checked.installed not in ("", version):
        print_message(
            f"note: DeepSpeed {checked.installed} is installed, and {version} is what is known",
            style="warning",
        )
    if checked.around.world_size is None:
        print_message(
            "note: without --world-size N the batch is checked in part only", style="warning"
        )
    if checked.has_error:
        raise TrainctlError.from_findings(checked.findings)
    show_findings(checked.findings)
    print_data(f"{path} is valid for DeepSpeed {version}")
