"""Charts of a plan and its data: learning rate, shares of sources, lengths of documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainctl.plans.schedule import Curve
from trainctl.plans.types import RunPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainctl.data.mixture import DataPlan
    from trainctl.data.statistics import SourceStatistics

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


def schedule_chart(plan: RunPlan, points: list[CurvePoint]) -> Figure:
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


def corpus_chart(found: Mapping[str, SourceStatistics], title: str) -> Figure:
    """Draw document lengths of each source, and below them its tokens and copies."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    lengths, sizes = figure.subplots(2, 1, height_ratios=(3, 2))
    for name, source in found.items():
        share = [count / max(1, source.documents) for count in source.lengths.values()]
        lengths.plot(list(source.lengths), share, marker="o", markersize=3, label=name)
    lengths.set_xscale("log", base=2)
    lengths.set_xlabel("tokens of a document, at most")
    lengths.set_ylabel("share of the documents")
    lengths.set_ylim(bottom=0)
    lengths.set_title(title)
    lengths.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    names = list(found)
    sizes.barh(names, [source.tokens for source in found.values()], height=0.6, alpha=0.35)
    for number, source in enumerate(found.values()):
        copies = f", {source.copies / max(1, source.documents):.1%} copies" if source.copies else ""
        sizes.annotate(
            f" {source.tokens:,} tokens of {source.documents:,} documents{copies}",
            (0, number),
            va="center",
        )
    sizes.invert_yaxis()
    sizes.set_xlabel("tokens")
    sizes.xaxis.set_major_formatter(EngFormatter(sep=""))
    sizes.grid(visible=False, axis="y")
    return figure


def mixture_chart(found: DataPlan, title: str) -> Figure:
    """Draw the share of each source over the steps, and below it the cumulative epochs of each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    shares, epochs = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    steps = [stage.first_step for stage in found.stages] + [found.stages[-1].end_step]
    names = list(found.run)
    heights = [
        [stage.sources[name].share if name in stage.sources else 0.0 for stage in found.stages]
        for name in names
    ]
    stacked = [[*row, row[-1]] for row in heights]
    shares.stackplot(steps, *stacked, labels=names, step="post")
    shares.set_ylabel("share of the tokens")
    shares.set_ylim(0, 1)
    shares.set_title(title)
    shares.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for name in names:
        passed = [0.0]
        for stage in found.stages:
            use = stage.sources.get(name)
            passed.append(passed[-1] + (use.epochs if use else 0.0))
        epochs.plot(steps, passed, label=name)
    epochs.set_ylabel("epochs")
    epochs.set_xlabel("optimizer step")
    epochs.set_ylim(bottom=0)
    epochs.margins(x=0)
    for stage in found.stages[1:]:
        for axes in (shares, epochs):
            axes.axvline(stage.first_step, color="0.4", linewidth=0.8, linestyle="--")
    epochs.xaxis.set_major_formatter("{x:,.0f}")
    return figure
