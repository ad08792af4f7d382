"""Chart of a search's variants: step time against memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from trainctl.hardware import Hardware
from trainctl.memory.budget import device_budget
from trainctl.memory.constants import GIB
from trainctl.memory.traced import traced_model
from trainctl.monitor.report.figure import COLOURS, INK, QUIET, save_chart
from trainctl.search.search import Search
from trainctl.search.space import Candidate

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


def save_plan_chart(result: Search, hardware: Hardware, path: Path, *, is_absolute: bool) -> None:
    """Write the chart of a search that found something.

    Args:
        hardware: Hardware that the plans are for.
        path: File to write; its suffix is the format, as in `save_figure`.
        is_absolute: Whether the hardware's speed is known; else times are multiples of the fastest.

    Raises:
        TrainctlError: Like `save_figure`.
    """
    first = result.found[0].plan
    title = f"{first.config.model.name} on {hardware.name}"
    save_chart(
        lambda: _chart(result, hardware, title, is_absolute=is_absolute),
        path,
        title=f"Plans of {title}",
    )


def _chart(result: Search, hardware: Hardware, title: str, *, is_absolute: bool) -> Figure:
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
        capacity = hardware.device_memory_bytes / GIB
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
