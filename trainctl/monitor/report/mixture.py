"""Chart of a run's sources over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trainctl.data.mixture import DataPlan


def chart(found: DataPlan, title: str) -> Figure:
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
