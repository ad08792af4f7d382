"""`trainctl validate` and `trainctl estimate-memory`: check a configuration, start nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from trainctl.cli.memory_comparison import Compared

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

Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also draw it: .png, .svg or .html.",
        show_default=False,
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Trace the model itself instead of deriving it from its shape; needs a few seconds.",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Make two real steps here, show predicted beside measured, and keep what differs by "
        "machine for later estimates.",
    ),
]
ForceSteps = Annotated[
    bool,
    typer.Option("--force", help="With --measure: start although the budget does not fit."),
]
UseCalibration = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration", help="Use what --measure has kept on this machine."
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
    from trainctl.cli.console import print_json, put, say
    from trainctl.cli.findings import findings_to_json, show_findings
    from trainctl.cli.planning import compose_target, plan

    if deepspeed is not None:
        _validate_file(deepspeed, overrides or [], world_size, model, as_json)
        return
    if world_size is not None or model is not None:
        raise TrainctlError(
            "--world-size and --model go with --deepspeed FILE",
            hint="without it, hardware=... and model=... say them",
        )
    try:
        planned = plan(compose_target(*split_target(overrides), config_dir), with_files=True)
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
        say(f"note: {technique}", style="warning")
    name = made.config.recipe or made.config.model.name
    put(f"{name} is valid on {made.hardware.name}")


def _validate_file(
    path: Path, overrides: list[str], world_size: int | None, model: Path | None, as_json: bool
) -> None:
    from trainctl.cli.console import print_json, put, say
    from trainctl.cli.deepspeed_file import check_file, surroundings
    from trainctl.cli.findings import findings_to_json, show_findings

    around = surroundings(overrides, world_size, model)
    checked = check_file(path, around)
    version = checked.schema.deepspeed
    if as_json:
        report = {"schema": 1, "valid": not checked.has_error, "deepspeed": version}
        print_json(report | {"findings": findings_to_json(checked.findings)})
        raise typer.Exit(2 if checked.has_error else 0)
    if checked.installed not in ("", version):
        say(
            f"note: DeepSpeed {checked.installed} is installed, and {version} is what is known",
            style="warning",
        )
    if around.world_size is None:
        say("note: without --world-size N the batch is checked in part only", style="warning")
    if checked.has_error:
        raise TrainctlError.from_findings(checked.findings)
    show_findings(checked.findings)
    put(f"{path} is valid for DeepSpeed {version}")


def estimate_memory(
    overrides: TargetAndOverrides = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
    plot: Plot = None,
    exact: Exact = False,
    run_steps: Measure = False,
    calibration: UseCalibration = True,
    force: ForceSteps = False,
) -> None:
    """Estimate memory on device, host, NVMe and disk.

    Exits with 0 if it fits (or may fit), 3 if not. A key with several values compares them.

    Examples: trainctl estimate-memory recipe=7b-zero3 hardware=8xa100-80g offload=cpu;
    trainctl estimate-memory recipe=7b-zero3 zero_stage=1,2,3 --plot memory.png
    """
    from trainctl.cli.memory_comparison import compare_memory, save_chart

    if run_steps:
        from trainctl.cli.measure import measure

        if plot is not None or exact or not calibration:
            raise TrainctlError(
                "--measure prints what was measured beside the estimate, and takes no other option "
                "of an estimate",
                hint="leave out --plot, --exact and --no-calibration, or --measure",
            )
        measure(overrides or [], config_dir, force=force, as_json=as_json)
        return
    if force:
        raise TrainctlError("--force starts the steps of --measure, and there is no --measure")
    if plot is not None:
        from trainctl.reports.figure import check_target

        check_target(plot)
    compared = compare_memory(overrides or [], config_dir, exact=exact, calibrated=calibration)
    if len(compared) > 1:
        _compare(compared, as_json)
        # One that is not legal is a row of the table; a table of nothing else is a mistake.
        legal = [item for item in compared if item.planned and item.planned.assessment.budget]
        status = 0 if legal else int(ExitCode.bad_input)
    else:
        status = _estimate(compared[0], as_json)
    if plot is not None:
        save_chart(compared, plot)
    if status:
        raise typer.Exit(status)


def _compare(compared: list[Compared], as_json: bool) -> None:
    from trainctl.cli.console import print_json
    from trainctl.cli.memory_comparison import show_comparison

    if as_json:
        print_json({"schema": 1, "configurations": [item.to_json() for item in compared]})
    else:
        show_comparison(compared)


def _estimate(one: Compared, as_json: bool) -> int:
    """Show one budget; the exit code."""
    from trainctl.cli.budget_view import show_budget
    from trainctl.cli.console import print_json, put
    from trainctl.cli.findings import show_findings
    from trainctl.cli.memory_comparison import trace_lines, trace_report
    from trainctl.cli.planning import show_slack, show_suggestions

    planned = one.planned
    assert planned is not None  # a single one that cannot be planned has raised
    budget = planned.assessment.budget
    if budget is None:
        raise TrainctlError.from_findings(planned.findings)
    traced = trace_report(planned)
    if as_json:
        print_json(budget.to_json() | ({"traced": traced} if traced else {}))
    else:
        show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
        for line in trace_lines(traced):
            put(line)
    show_findings(planned.findings)
    if not planned.errors_but_fit and planned.errors and not as_json:
        show_suggestions(planned.composed.config, planned.hardware)
    if not planned.errors and not as_json:
        show_slack(planned.composed.config, planned.hardware)
    return int(planned.errors[0].exit_code) if planned.errors else 0
