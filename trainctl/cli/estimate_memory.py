"""`trainctl estimate-memory`: whether a configuration fits, and what takes the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Json, Plot, TargetAndOverrides
from trainctl.cli.console import (
    print_data,
    print_json,
    print_message,
    print_table,
    show_findings,
    write_chart,
)
from trainctl.cli.plan_view import show_budget, show_suggestions
from trainctl.config.overrides import recipe_as_override, split_target
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launchers.measure import measure
from trainctl.launchers.planning import PlannedConfig, PlannedPoint, plan_points
from trainctl.memory.traced import compare_with_closed_form
from trainctl.monitor.plan_text import plan_subject, plan_title

FITS = {True: "fits", False: "does not fit", None: "too close to tell"}

TRACED = {"parameters": "parameters", "block_bytes_per_token": "bytes per token that a block keeps"}
"""Traced quantities in words."""

Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Trace the model instead of deriving it from its shape; takes a few seconds.",
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Train two steps here, compare measured with predicted memory, and keep this "
        "machine's constants for later estimates.",
    ),
]
ForceSteps = Annotated[
    bool,
    typer.Option("--force", help="With --measure: start even if the memory budget does not fit."),
]
UseCalibration = Annotated[
    bool,
    typer.Option(
        "--calibration/--no-calibration",
        help="Use the constants that --measure kept on this machine.",
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
        _measure_configuration(overrides or [], config_dir, force=force, as_json=as_json)
        return
    if force:
        raise TrainctlError("--force starts the steps of --measure, and there is no --measure")
    target, rest = split_target(overrides)
    points = plan_points(target, rest, config_dir, exact=exact, calibrated=calibration)
    if len(points) > 1:
        _print_comparison(points, as_json)
        show_findings(_warnings_of(points))
        # An illegal configuration is a row of the table; if all are, the input is bad.
        status = 0 if any(point.budget for point in points) else int(ExitCode.bad_input)
    else:
        assert points[0].planned is not None  # a single configuration without a plan has raised
        status = _print_budget(points[0].planned, as_json)
    if plot is not None:
        _write_chart(points, plot)
    if status:
        raise typer.Exit(status)


def _print_comparison(points: Sequence[PlannedPoint], as_json: bool) -> None:
    """Print the model, and for each configuration its values, peak, phase, host memory and
    verdict.
    """
    if as_json:
        print_json({"schema": 1, "configurations": [point.to_json() for point in points]})
        return
    plans = [point.planned.assessment.plan for point in points if point.planned]
    for subject in dict.fromkeys(plan_subject(each) for each in plans if each):
        print_data(subject)
    rows = []
    for point in points:
        budget = point.budget
        if budget is None:
            rows.append((point.name, "–", "", "", "; ".join(point.errors)))
            continue
        peak, host = budget.device_peak_bytes / 2**30, budget.host.bytes_per_node / 2**30
        verdict = FITS[budget.fits]
        rows.append((point.name, f"{peak:,.2f}", budget.peak_phase, f"{host:,.2f}", verdict))
    print_table(("configuration", "peak, GiB", "at", "host, GiB", ""), rows, right=(1, 3))


def _warnings_of(points: Sequence[PlannedPoint]) -> list[Finding]:
    """Return the warnings of all configurations, without those on memory, which the table shows."""
    found = [each for point in points if point.planned for each in point.planned.findings]
    return [
        each
        for each in dict.fromkeys(found)
        if not each.is_error and each.exit_code is not ExitCode.does_not_fit
    ]


def _print_budget(planned: PlannedConfig, as_json: bool) -> int:
    budget, hardware = planned.budget, planned.hardware
    traced = compare_with_closed_form(planned.traced, planned.plan) if planned.traced else {}
    if as_json:
        print_json(budget.to_json() | ({"traced": traced} if traced else {}))
    else:
        print_data(plan_title(planned.plan))
        show_budget(budget.to_json(), host_capacity_bytes=hardware.host_memory_bytes)
        for key, what in TRACED.items() if traced else ():
            sizes = traced[key]
            print_data(f"traced: {sizes['traced']:,} {what} ({_size_difference(sizes)})")
    show_findings(planned.findings)
    if not planned.unforceable_errors and not as_json:
        show_suggestions(planned)
    return int(planned.errors[0].exit_code) if planned.errors else 0


def _size_difference(sizes: Mapping[str, int]) -> str:
    traced, closed = sizes["traced"], sizes.get("closed_form")
    if closed is None:
        return "it has no closed form"
    if traced == closed:
        return "as by the closed form"
    return f"the closed form: {closed:,}, {closed / traced - 1:+.2%}"


def _write_chart(points: Sequence[PlannedPoint], path: Path) -> None:
    """Write a chart of the configurations that have a budget.

    Raises:
        TrainctlError: No configuration has a budget, or the chart cannot be written.
    """
    from trainctl.monitor.report.figure import memory_figure

    budgets = {
        point.name or point.planned.composed.config.model.name: point.budget
        for point in points
        if point.planned is not None and point.budget is not None
    }
    if not budgets:
        errors = "; ".join(error for point in points for error in point.errors)
        raise TrainctlError(f"nothing to draw: {errors}")
    write_chart(lambda: memory_figure(budgets), path, title=f"Memory: {', '.join(budgets)}")


def _measure_configuration(
    overrides: list[str], config_dir: Path | None, *, force: bool, as_json: bool
) -> None:
    found = measure(recipe_as_override(overrides), config_dir, force=force, say=print_message)
    show_findings(found.findings)
    if as_json:
        print_json({"schema": 1, "phases": found.rows, "calibration": str(found.calibration)})
        return
    lines = []
    for row in found.rows:
        predicted, measured = row["predicted_bytes"], row["measured_bytes"]
        sizes = (f"{size / 2**30:.3f}" for size in (predicted, measured))
        lines.append((row["part"], *sizes, f"{predicted / measured - 1:+.1%}"))
    what = "in tensors" if found.on_device else "of a process"
    heads = ("part of a step", f"predicted {what}, GiB", "measured, GiB", "")
    print_table(heads, lines, right=(1, 2, 3))
    if found.runtime_bytes is not None:
        print_data(f"Outside of tensors, in a process: {found.runtime_bytes / 2**30:.2f} GiB")
    print_message(f"kept in {found.calibration} for estimates on this machine")
