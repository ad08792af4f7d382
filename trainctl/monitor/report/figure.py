"""Charts as files, drawn with matplotlib: PNG, SVG, or one self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from cycler import cycler
from matplotlib import colormaps, rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainctl.errors import ExitCode, TrainctlError
from trainctl.memory.budget import MemoryBudget, device_budget
from trainctl.memory.constants import GIB
from trainctl.memory.rank import NAMES, Components
from trainctl.memory.traced import traced_model
from trainctl.monitor.report.history import History
from trainctl.runs.files import write_bytes
from trainctl.tuning.search import Search
from trainctl.tuning.space import Candidate

SUFFIXES = (".png", ".svg", ".html")

DOTS_PER_INCH = 144

INK, QUIET, GRID = "#15181c", "#545b65", "#e3e6ea"
COLOURS = (
    "#0b57d0", "#c2410c", "#0f766e", "#8b3fbf", "#b0215f", "#5f6b00", "#0e7490", "#7c4a12",
)  # fmt: skip
"""Colours of lines and points, in this order; all have enough contrast on white."""

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": QUIET,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 2rem auto; max-width: 75rem; font-family: sans-serif; }}
svg {{ width: 100%; height: auto; }}</style>
{svg}
</html>
"""


def check_target(path: Path) -> None:
    """Raise if a chart cannot be written to this path, before the work for it is done.

    Raises:
        TrainctlError: The suffix is none of `SUFFIXES`, or there is no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise TrainctlError(
            f"{path}: a chart is written as {', '.join(SUFFIXES)}",
            hint=f"{path.with_suffix('.png')}",
            exit_code=ExitCode.bad_input,
        )
    if not path.absolute().parent.is_dir():
        raise TrainctlError(
            f"{path}: there is no folder {path.parent}",
            hint=f"mkdir -p {path.parent}",
            exit_code=ExitCode.bad_input,
        )


_drawing = Lock()
"""Held while the style is set: matplotlib's settings are the process's."""


def save_chart(draw: Callable[[], Figure], path: Path, *, title: str) -> None:
    """Draw in the style that all charts share, and write the figure; see `save_figure`."""
    with _drawing, rc_context(_STYLE):
        save_figure(draw(), path, title=title)


def chart_element(draw: Callable[[], Figure]) -> str:
    """Draw in the style that all charts share, and return the figure as an svg element."""
    with _drawing, rc_context(_STYLE):
        return _element(_svg(draw()))


def save_figure(figure: Figure, path: Path, *, title: str) -> None:
    """Write a figure in the format of the suffix of `path`.

    Args:
        figure: Made without pyplot, so that no global state keeps it.
        path: File to write: .png, .svg or .html (the chart as SVG in a page of its own).

    Raises:
        TrainctlError: Like `check_target`, or the file cannot be written.
    """
    check_target(path)
    suffix = path.suffix.lower()
    data = _png(figure) if suffix == ".png" else _svg(figure)
    if suffix == ".html":
        page = PAGE.format(title=html.escape(title), svg=_element(data))
        data = page.encode()
    try:
        write_bytes(path, data)
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be written: {error.strerror}", exit_code=ExitCode.bad_input
        ) from error


def loss_svg(history: History) -> str:
    """Return the curve of a run's loss as an svg element, with the held-out losses as points."""
    return chart_element(lambda: loss_figure(history))


def loss_figure(history: History) -> Figure:
    """Draw the curve of a run's loss, with the held-out losses as points."""
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(history.steps["step"], history.steps["loss"], label="training")
    held_out = history.evaluations
    if len(held_out):
        axes.plot(held_out["step"], held_out["loss"], "o", label="held out")
        axes.legend()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss, nats a token")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.margins(x=0)
    return figure


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight")
    return stream.getvalue()


def _svg(figure: Figure) -> bytes:
    stream = io.BytesIO()
    # No date and no random ids: the same chart gives the same file.
    with rc_context({"svg.hashsalt": "trainctl"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()


def _element(svg: bytes) -> str:
    """Return the svg element without the XML declarations of a file."""
    text = svg.decode()
    return text[text.index("<svg") :]


LEAST_SHARE = 0.002
"""Share of the highest bar below which a part is not in the legend."""

MOST_CONFIGURATIONS = 12
"""Most configurations that are readable side by side."""

PANEL_INCHES = (3.8, 4.6)


def memory_figure(budgets: Mapping[str, MemoryBudget]) -> Figure:
    """Draw a panel for each budget, by its title: a bar per phase.

    Raises:
        TrainctlError: There are too many budgets for one chart.
    """
    if len(budgets) > MOST_CONFIGURATIONS:
        raise TrainctlError(
            f"{len(budgets)} configurations are too many for one chart",
            hint=f"at most {MOST_CONFIGURATIONS}",
        )
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


HIGHEST = 6.0
"""Largest multiple of the fastest step time that is drawn; slower variants are only counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A point of the chart."""

    seconds: float
    """Predicted time of a step with as many tokens as the fastest plan's."""
    gibibytes: float
    """Predicted peak memory of the fullest device, in GiB."""
    stage: int
    fits: bool
    """Whether it surely fits on the device, or the device's memory is unknown."""


def variants_of(candidates: Sequence[Candidate], tokens: int) -> list[Variant]:
    """Return step time and memory of variants.

    Args:
        tokens: Tokens of a step to compare at: batches of variants differ by up to a tenth.
    """
    found = []
    for candidate in candidates:
        sketch = candidate.variant.sketch
        memory = device_budget(sketch, traced_model(sketch.config))
        found.append(
            Variant(
                seconds=candidate.variant.seconds_per_token * tokens,
                gibibytes=memory.device_peak_bytes / GIB,
                stage=sketch.config.zero_stage.stage,
                fits=bool(memory.fits) or not memory.device_capacity_bytes,
            )
        )
    return found


def frontier(variants: Sequence[Variant]) -> list[Variant]:
    """Return the Pareto-optimal variants in time and memory, by memory."""
    best: list[Variant] = []
    for variant in sorted(variants, key=lambda each: (each.gibibytes, each.seconds)):
        if not best or variant.seconds < best[-1].seconds:
            best.append(variant)
    return best


def plan_figure(result: Search) -> Figure:
    """Draw step time over memory of the variants of a search that found something.

    If the hardware's speed is not known, times are multiples of the fastest.
    """
    hardware, is_absolute = result.hardware, result.rates_are_known
    title = f"{result.found[0].plan.config.model.name} on {hardware.name}"
    tokens = result.found[0].plan.batch.tokens_per_step
    every = variants_of(result.candidates, tokens)
    unit = 1.0 if is_absolute else min(each.seconds for each in every)
    slowest = HIGHEST * min(found.time.seconds for found in result.found)
    shown = [each for each in every if each.seconds <= slowest]
    figure = Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.subplots()
    for stage in sorted({each.stage for each in shown}):
        for fits in (False, True):
            chosen = [each for each in shown if (each.stage, each.fits) == (stage, fits)]
            axes.scatter(
                [each.gibibytes for each in chosen],
                [each.seconds / unit for each in chosen],
                s=14,
                color=COLOURS[stage],
                alpha=0.7 if fits else 0.15,
                linewidths=0,
                label=f"ZeRO {stage}" if fits else None,
            )
    best = frontier([each for each in shown if each.fits])
    sizes, times = [each.gibibytes for each in best], [each.seconds / unit for each in best]
    axes.step(sizes, times, where="post", color=INK, linewidth=1.3, label="frontier")
    for number, found in reversed(list(enumerate(result.found, 1))):
        seconds = found.time.seconds / found.plan.batch.tokens_per_step * tokens
        axes.annotate(
            str(number),
            (found.budget.device_peak_bytes / GIB, seconds / unit),
            ha="center",
            va="center",
            fontsize="small",
            fontweight="bold",
            bbox={"boxstyle": "circle,pad=0.25", "facecolor": "white", "edgecolor": INK},
            zorder=5,
        )
    if hardware.device_memory_bytes:
        _mark_capacity(axes, hardware.device_memory_bytes / GIB)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("predicted memory of the fullest device, GiB; pale: it does not surely fit")
    of = "s" if is_absolute else "times the fastest variant's"
    axes.set_ylabel(f"predicted time of a step, {of}")
    left_out = len(every) - len(shown)
    slower = f", {left_out:,} slower ones not shown" if left_out else ""
    axes.set_title(
        f"{title}: {len(every):,} variants{slower}\n"
        f"Steps of {tokens:,} tokens; the numbered ones are those that are listed",
        fontsize="medium",
    )
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _mark_capacity(axes: Axes, capacity: float) -> None:
    axes.axvline(capacity, color=INK, linewidth=1, linestyle="--")
    axes.annotate(
        "capacity",
        (capacity, 1),
        xycoords=("data", "axes fraction"),
        xytext=(4, -4),
        textcoords="offset points",
        va="top",
        color=QUIET,
    )
    axes.set_xlim(0, 1.5 * capacity)
