"""The learning-rate schedule of a plan, step by step: as data and as a chart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainctl.plan.schedule import Curve
from trainctl.plan.types import RunPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_POINTS = 2000
"""Most points of a curve: more than a chart can show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """One optimizer step of the schedule."""

    step: int
    """Number of the step, from 1."""
    tokens: int
    learning_rate: float
    """Peak learning rate times the schedule's factor; parameter groups may scale it further."""
    global_batch_size: int


def points_of(plan: RunPlan, most: int = MOST_POINTS) -> list[CurvePoint]:
    """Return every step, or about `most` steps of a longer run, with all corners of the curve."""
    curve, total = Curve.of(plan), plan.total_steps
    steps = set(range(0, total, -(-total // most))) if total else set()
    corners = [phase.first_step + side for phase in plan.ramp for side in (-1, 0)]
    corners += [turn + side for turn in curve.turns for side in (-1, 0)]
    corners += [plan.warmup_steps - 1, plan.warmup_steps, curve.stable_steps - 1, total - 1]
    steps |= {step for step in corners if 0 <= step < total}
    return [
        CurvePoint(
            step=step + 1,
            tokens=plan.batches.tokens_before(step),
            learning_rate=plan.peak_lr * curve.factor(step),
            global_batch_size=plan.batches.at(step).global_batch_size,
        )
        for step in sorted(steps)
    ]


def title_of(plan: RunPlan) -> str:
    """Return the chart's title."""
    return f"Learning rate of {plan.config.recipe or plan.config.model.name}"


def chart(plan: RunPlan, points: list[CurvePoint]) -> Figure:
    """Draw the learning rate over the steps, and the batch size below it if the plan has a ramp."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5 if plan.ramp else 4), layout="constrained")
    rows = 2 if plan.ramp else 1
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=(3, 1)[:rows])
    rate = axes[0][0]
    steps = [point.step for point in points]
    rate.plot(steps, [point.learning_rate for point in points])
    rate.set_ylabel("learning rate")
    rate.set_title(title_of(plan))
    rate.set_ylim(bottom=0)
    rate.margins(x=0)
    ends = [("end of warmup", plan.warmup_steps), ("decay", Curve.of(plan).stable_end)]
    for label, step in ends:
        if step is not None and 0 < step < plan.total_steps:
            rate.axvline(step, color="0.4", linewidth=0.8, linestyle="--")
            rate.annotate(
                label,
                (step, 0),
                xytext=(4, 4),
                textcoords="offset points",
                color="0.4",
                fontsize="small",
            )
    if plan.ramp:
        sizes = axes[1][0]
        sizes.step(steps, [point.global_batch_size for point in points], where="post")
        sizes.set_ylabel("sequences\nin a step")
        sizes.set_ylim(bottom=0)
    axes[-1][0].set_xlabel("optimizer step")
    axes[-1][0].xaxis.set_major_formatter("{x:,.0f}")
    rate.yaxis.set_major_formatter("{x:.3g}")
    return figure
