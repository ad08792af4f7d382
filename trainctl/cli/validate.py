"""`trainctl validate`: every problem of a configuration or of a DeepSpeed JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import (
    findings_to_json,
    print_data,
    print_json,
    print_message,
    show_findings,
)
from trainctl.errors import TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.launchers.planning import compose_config, compose_target, plan_config
from trainctl.rules.registry import check_file, json_context

DeepSpeedFile = Annotated[
    Path | None,
    typer.Option(
        "--deepspeed",
        metavar="FILE",
        help="Check this DeepSpeed JSON instead.",
        show_default=False,
    ),
]
WorldSize = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="With --deepspeed: ranks.", show_default=False),
]
ModelDirectory = Annotated[
    Path | None,
    typer.Option(
        "--model",
        metavar="DIR",
        help="With --deepspeed: a transformers directory.",
        show_default=False,
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
        planned = plan_config(compose_target(*split_target(overrides), config_dir), with_files=True)
        findings, made = planned.findings, planned.assessment.plan
    except TrainctlError as error:
        if not as_json:
            raise
        findings, made = error.findings, None
    not_yet = made.not_yet if made else ()
    errors = [finding for finding in findings if finding.is_error]
    if as_json:
        report = {"schema": 1, "valid": not errors, "findings": findings_to_json(findings)}
        print_json(report | {"not_yet": list(not_yet)})
        raise typer.Exit(errors[0].exit_code if errors else 0)
    if errors or made is None:
        raise TrainctlError.from_findings(findings)
    show_findings(findings)
    for technique in not_yet:
        print_message(f"note: {technique}", style="warning")
    name = made.config.recipe or made.config.model.name
    print_data(f"{name} is valid on {made.hardware.name}")


def _validate_file(
    path: Path, overrides: list[str], world_size: int | None, model: Path | None, as_json: bool
) -> None:
    around = json_context(_hardware(overrides), world_size, model)
    checked = check_file(path, around)
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
    if around.world_size is None:
        print_message(
            "note: without --world-size N the batch is checked in part only", style="warning"
        )
    if checked.has_error:
        raise TrainctlError.from_findings(checked.findings)
    show_findings(checked.findings)
    print_data(f"{path} is valid for DeepSpeed {version}")


def _hardware(overrides: list[str]) -> Hardware | None:
    """Return the machines that `hardware=...` describes; None without overrides.

    Raises:
        TrainctlError: Something else is overridden.
    """
    others = [text for text in overrides if not text.startswith(("hardware=", "hardware."))]
    if others:
        raise TrainctlError(
            f"{others[0]} has no effect on a DeepSpeed JSON",
            hint="beside --deepspeed only hardware=... says something: kind and number of devices",
        )
    return resolve_hardware(compose_config(overrides, None).config.hardware) if overrides else None
