"""Chart of a memory budget: a stacked bar for each phase of each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainctl.errors import TrainctlError
from trainctl.memory.budget import MemoryBudget
from trainctl.memory.constants import GIB
from trainctl.memory.rank import NAMES, Components
from trainctl.monitor.report.figure import save_chart

LEAST_SHARE = 0.002
"""Share of the highest bar below which a part is not in the legend."""

MOST_CONFIGURATIONS = 12
"""Most configurations that are readable side by side."""

PANEL_INCHES = (3.8, 4.6)


def save_memory_chart(budgets: Mapping[str, MemoryBudget], path: Path) -> None:
    """Write a chart with a panel for each configuration.

    Args:
        budgets: Budgets by the title of their panel; at least one.
        path: File to write; its suffix is the format: PNG, SVG or HTML.

    Raises:
        TrainctlError: There are too many configurations, or the file cannot be written.
    """
    if len(budgets) > MOST_CONFIGURATIONS:
        raise TrainctlError(
            f"{len(budgets)} configurations are too many for one chart",
            hint=f"at most {MOST_CONFIGURATIONS}",
        )
    save_chart(lambda: _chart(budgets), path, title=f"Memory: {', '.join(budgets)}")


def _chart(budgets: Mapping[str, MemoryBudget]) -> Figure:
    parts = _parts([budget.worst_stage.moments for budget in budgets.values()])
    palette = colormaps["tab20"]
    colours = {name: palette(index) for index, name in enumerate(NAMES)}
    width, height = PANEL_INCHES
    figure = Figure(figsize=(2.2 + width * len(budgets), height), layout="constrained")
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for axes, (name, budget) in zip(panels, budgets.items(), strict=True):
        _draw(axes, name, budget, parts, colours)
    panels[0].set_ylabel("memory of a device, GiB")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False)
    return figure


def _parts(bars: Sequence[Mapping[str, Components]]) -> list[str]:
    """Return the parts that are visible in any bar, from the bottom to the top."""
    moments = [moment for bar in bars for moment in bar.values()]
    least = LEAST_SHARE * max(moment.total for moment in moments)
    sizes = [moment.to_json() for moment in moments]
    return [name for name in NAMES if max(size[name] for size in sizes) > least]


def _draw(
    axes: Axes,
    name: str,
    budget: MemoryBudget,
    parts: Sequence[str],
    colours: Mapping[str, tuple[float, float, float, float]],
) -> None:
    """Draw the panel of one configuration: a bar per phase, on the fullest pipeline stage."""
    moments = {phase: moment.to_json() for phase, moment in budget.worst_stage.moments.items()}
    labels = [phase.replace("_", "\n") for phase in moments]
    bottom = [0.0] * len(moments)
    for part in parts:
        heights = [sizes[part] / GIB for sizes in moments.values()]
        label = part.replace("_", " ")
        axes.bar(labels, heights, bottom=bottom, color=colours[part], label=label, width=0.75)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for index, total in enumerate(bottom):
        axes.annotate(f"{total:.3g}", (index, total), ha="center", va="bottom", fontsize="small")
    if budget.device_capacity_bytes:
        capacity = budget.device_capacity_bytes / GIB
        axes.axhline(capacity, color="black", linestyle="--", linewidth=1, label="capacity")
    verdict = {True: "fits", False: "does not fit", None: "not decided"}[budget.fits]
    stage = ""
    if len(budget.stages) > 1:
        stage = f", stage {budget.worst_stage.pipeline_stage} of {len(budget.stages)}"
    axes.set_title(f"{name}\n{verdict}{stage}", fontsize="medium")
    axes.tick_params(axis="x", labelsize="small")
    axes.margins(y=0.08)
    axes.grid(visible=False, axis="x")
