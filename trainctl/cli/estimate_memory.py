"""`trainctl estimate-memory`: whether a configuration fits, and what takes the memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides
from trainctl.cli.budget_view import show_budget
from trainctl.cli.console import print_json, put
from trainctl.cli.findings import show_findings
from trainctl.cli.measure import measure
from trainctl.cli.memory_comparison import (
    Compared,
    compare_memory,
    save_chart,
    show_comparison,
    trace_lines,
    trace_report,
)
from trainctl.cli.plan_view import plan_title
from trainctl.cli.planning import show_slack, show_suggestions
from trainctl.errors import ExitCode, TrainctlError

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
    if run_steps:
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
        from trainctl.monitor.report.figure import check_target

        check_target(plot)
    compared = compare_memory(overrides or [], config_dir, exact=exact, calibrated=calibration)
    if len(compared) > 1:
        _compare(compared, as_json)
        # An illegal configuration is a row of the table; if all are, the input is bad.
        legal = [item for item in compared if item.planned and item.planned.assessment.budget]
        status = 0 if legal else int(ExitCode.bad_input)
    else:
        status = _estimate(compared[0], as_json)
    if plot is not None:
        save_chart(compared, plot)
    if status:
        raise typer.Exit(status)


def _compare(compared: list[Compared], as_json: bool) -> None:
    if as_json:
        print_json({"schema": 1, "configurations": [item.to_json() for item in compared]})
    else:
        show_comparison(compared)


def _estimate(one: Compared, as_json: bool) -> int:
    """Show one budget and return the exit code."""
    planned = one.planned
    assert planned is not None  # a single configuration without a plan has raised
    budget = planned.assessment.budget
    if budget is None:
        raise TrainctlError.from_findings(planned.findings)
    traced = trace_report(planned)
    if as_json:
        print_json(budget.to_json() | ({"traced": traced} if traced else {}))
    else:
        assert planned.assessment.plan is not None  # there is a budget
        put(plan_title(planned.assessment.plan))
        show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
        for line in trace_lines(traced):
            put(line)
    show_findings(planned.findings)
    if not planned.unforceable_errors and planned.errors and not as_json:
        show_suggestions(planned.composed.config, planned.hardware)
    if not planned.errors and not as_json:
        show_slack(planned.composed.config, planned.hardware)
    return int(planned.errors[0].exit_code) if planned.errors else 0
