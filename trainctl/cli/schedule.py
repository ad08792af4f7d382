"""`trainctl schedule`: the learning rate over the run, before training."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, check_chart_file
from trainctl.cli.console import print_data, print_json, show_findings, write_chart
from trainctl.config.codec import to_plain
from trainctl.monitor.report.charts import CurvePoint, points_of, schedule_chart, title_of
from trainctl.options.schedule import WithPatience
from trainctl.plans.schedule import Curve
from trainctl.plans.types import RunPlan

ROWS = 18
"""Height of the chart in the terminal."""

MOST_TURNS = 8
"""Drops or restarts of the learning rate that are listed."""

app = typer.Typer(help="Show the learning rate over the run.", add_completion=False)


@app.callback()
def _group() -> None:
    pass


@app.command()
def show(
    target: TargetAndOverrides = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the chart to a .png, .svg or .html file instead.",
            callback=check_chart_file,
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Draw the learning rate of each optimizer step.

    Examples: trainctl schedule show recipe=tiny schedule=wsd; trainctl schedule show runs/NAME
    training.steps=2000 --plot schedule.png
    """
    planned = api.plan(*(target or ()), config_dir=config_dir)
    made = planned.details.plan
    show_findings([finding for finding in planned.findings if not finding.is_error])
    points = points_of(made)
    if plot is not None:
        write_chart(lambda: schedule_chart(made, points), plot, title=title_of(made))
    if as_json:
        print_json(_document(made, points))
    elif plot is None:
        if points:
            print_data(_drawing(made, points))
        for line in _phases(made):
            print_data(line)


def _document(plan: RunPlan, points: list[CurvePoint]) -> dict[str, object]:
    return {
        "schema": 1,
        "kind": plan.config.schedule.kind,
        "unit": plan.config.schedule.unit.value,
        "total_steps": plan.total_steps,
        "warmup_steps": plan.warmup_steps,
        "stable_end": Curve.of(plan).stable_end,
        "points": to_plain(points),
    }


def _drawing(plan: RunPlan, points: list[CurvePoint]) -> str:
    """Draw the curve in characters, as wide as the terminal (80 columns if there is none)."""
    import plotext

    peak = plan.peak_lr
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(shutil.get_terminal_size().columns, ROWS)
    steps, rates = [point.step for point in points], [point.learning_rate for point in points]
    figure.draw(figure.signal(steps, rates, marker="braille").lines())
    levels = [peak * quarter / 4 for quarter in range(5)]
    figure.ruler(1, 0).lim(0, peak).ticks(levels, [f"{level:.3g}" for level in levels])
    marks = sorted({1 + (plan.total_steps - 1) * mark // 6 for mark in range(7)})
    figure.ruler(0, 0).ticks(marks, [f"{mark:,}" for mark in marks])
    figure.title(title_of(plan))
    figure.label("optimizer step", 0)
    drawn: str = plotext.uncolorize(str(figure.build()))
    return "\n".join(line.rstrip() for line in drawn.splitlines())


def _phases(plan: RunPlan) -> list[str]:
    """Return a line for each point where the curve turns, and for each batch size."""
    curve, total, peak = Curve.of(plan), plan.total_steps, plan.peak_lr
    if total == 0:
        return ["no step"]
    ends = {
        "first step": 1,
        "end of the warmup": plan.warmup_steps,
        "end of the stable phase": curve.stable_end or 0,
        "last step": total,
    }
    rows = [
        (name, step, plan.batches.tokens_before(step), peak * curve.factor(step - 1))
        for name, step in ends.items()
        if 0 < step <= total
    ]
    lines = [
        f"  {name:<24} step {step:>9,}  after it {tokens:>17,} tokens  learning rate {rate:.4g}"
        for name, step, tokens, rate in rows
    ]
    turns = curve.turns[:MOST_TURNS]
    lines += [
        f"  {'turn':<24} step {step + 1:>9,}  before it {plan.batches.tokens_before(step):>16,}"
        f" tokens  learning rate {peak * curve.factor(step):.4g}"
        for step in turns
    ]
    if len(curve.turns) > len(turns):
        lines.append(f"  and {len(curve.turns) - len(turns):,} turns more")
    schedule = plan.config.schedule
    if isinstance(schedule, WithPatience):
        lines.append(
            f"  x {schedule.step_factor:g} after every {schedule.plateau_patience} evaluations"
            f" without a lower held-out loss, not below {peak * curve.floor:.4g}"
        )
    return lines + [
        f"  batch of {phase.batch.global_batch_size:,} sequences from step {phase.first_step + 1:,}"
        for phase in plan.ramp
    ]
