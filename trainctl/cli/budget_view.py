"""The memory budget as a table with a bar for each component."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainctl.cli.console import put

LABEL_WIDTH = 26
BAR_WIDTH = 40
LINE_WIDTH = 76
"""Width of the components' line in the brief view, in characters."""
PARTIAL_BLOCKS = " ▏▎▍▌▋▊▉"
"""Characters that fill one to seven eighths of a cell."""


def show_budget(budget: Mapping[str, Any], *, host_capacity_bytes: int | None) -> None:
    """Print the table of `MemoryBudget.to_json()` on stdout.

    `host_capacity_bytes` is the host memory of a node; None if unknown.
    """
    unicode_bars = (sys.stdout.encoding or "").lower().startswith("utf")
    styles = {True: "good", False: "error", None: "warning"}
    for line in budget_lines(budget, host_capacity_bytes, unicode_bars=unicode_bars):
        put(line, style=styles[budget["fits"]] if line.startswith("  peak") else "")


def show_brief_budget(budget: Mapping[str, Any]) -> None:
    """Print the budget in a few lines on stdout; `show_budget` prints all of it."""
    styles = {True: "good", False: "error", None: "warning"}
    first, *others = brief_lines(budget)
    put(first, style=styles[budget["fits"]])
    for line in others:
        put(line)


def brief_lines(budget: Mapping[str, Any]) -> list[str]:
    """Return a line each for the peak, its components, host memory, NVMe and disk."""
    number = _number_format(budget["device_peak_bytes"])
    result, between = _verdict(budget, number)
    peak = f"{number(budget['device_peak_bytes'])}{result} ({between})"
    lines = [f"Memory of a device, GiB: {peak}", f"  {_largest_parts(budget, number)}"]
    for name, size in (
        ("Host memory of a node", budget["host"]["bytes_per_node"]),
        ("NVMe of a node", budget["nvme_bytes_per_node"]),
    ):
        lines += [f"{name}: {_number_format(size)(size)} GiB"] if size else []
    return [*lines, _disk_line(budget)]


def _largest_parts(budget: Mapping[str, Any], number: Any) -> str:
    """List the peak's largest components that fit one line, and the sum of the others."""
    sizes = sorted(((size, name) for name, size in budget["components"].items()), reverse=True)
    line = ""
    for count in range(1, len(sizes) + 1):
        rest = sum(size for size, _ in sizes[count:])
        parts = [f"{name} {number(size)}" for size, name in sizes[:count] if size]
        longer = ", ".join(parts + ([f"other {number(rest)}"] if rest else []))
        if line and len(longer) > LINE_WIDTH:
            break
        line = longer
    return line


def budget_lines(
    budget: Mapping[str, Any], host_capacity_bytes: int | None, *, unicode_bars: bool = True
) -> list[str]:
    """Return the table's lines: components of the worst pipeline stage at its peak, then the rest.

    Bars share one scale, in which the full width is the device's capacity or, when the peak does
    not fit, the peak.
    """
    capacity, peak = budget["device_capacity_bytes"], budget["device_peak_bytes"]
    number = _number_format(peak)
    scale = max(capacity, peak, 1)
    title = "Memory of a device, GiB"
    worst = max(budget["stages"], key=lambda stage: stage["peak_bytes"], default=None)
    if worst and len(budget["stages"]) > 1:
        title += (
            f" (pipeline stage {worst['pipeline_stage']} of {len(budget['stages'])}, the worst)"
        )
    lines = [title]
    for name, size in budget["components"].items():
        if size:
            bar = _bar(size / scale, unicode_bars)
            lines.append(f"  {name:<{LABEL_WIDTH}}{number(size):>10}  {bar}".rstrip())
    lines.append(_peak_line(budget, number))
    phases = ", ".join(f"{name} {number(size)}" for name, size in budget["phases"].items())
    lines.append(f"  {'by phase':<{LABEL_WIDTH}}{phases}")
    if budget["device_reserved_bytes"]:
        lines.append(_line("reserved by the allocator", number(budget["device_reserved_bytes"])))
    lines += _host_lines(budget["host"], host_capacity_bytes)
    if budget["nvme_bytes_per_node"]:
        nvme = budget["nvme_bytes_per_node"]
        lines.append(f"NVMe of a node: {_number_format(nvme)(nvme)} GiB")
    lines.append(_disk_line(budget))
    if budget["weights_only_bytes"]:
        one, kept = budget["weights_only_bytes"], budget["weights_only_kept_bytes"]
        number = _number_format(one)
        lines.append(f"Weights alone on disk: {number(one)} GiB each, {number(kept)} GiB kept")
    return lines + [f"note: {note}" for note in budget["notes"]]


def _disk_line(budget: Mapping[str, Any]) -> str:
    one, kept = budget["checkpoint_bytes"], budget["checkpoints_kept_bytes"]
    number = _number_format(one)
    return f"Checkpoints on disk: {number(one)} GiB each, {number(kept)} GiB kept"


def _verdict(budget: Mapping[str, Any], number: Any) -> tuple[str, str]:
    """Return the capacity with the verdict, and the bounds of the peak, as text."""
    verdict = {True: "fits", False: "does not fit", None: "too close to tell"}[budget["fits"]]
    low, high = budget["device_peak_low_bytes"], budget["device_peak_high_bytes"]
    capacity = budget["device_capacity_bytes"]
    result = f" of {number(capacity)}: {verdict}" if capacity else ", capacity unknown"
    return result, f"between {number(low)} and {number(high)}"


def _peak_line(budget: Mapping[str, Any], number: Any) -> str:
    result, between = _verdict(budget, number)
    value = number(budget["device_peak_bytes"])
    return _line(f"peak, at {budget['peak_phase']}", f"{value}{result} ({between})", value)


def _host_lines(host: Mapping[str, Any], capacity: int | None) -> list[str]:
    size = host["bytes_per_node"]
    if not size:
        return []
    number = _number_format(size)
    of = f" of {number(capacity)}" if capacity else ""
    parts = ", ".join(f"{name} {number(part)}" for name, part in host["components"].items() if part)
    return [f"Host memory of a node: {number(size)}{of} GiB ({parts})"]


def _line(label: str, text: str, aligned: str = "") -> str:
    """Return a row in which `aligned`, by default all of `text`, ends in the column of numbers."""
    indent = 10 - len(aligned or text)
    return f"  {label:<{LABEL_WIDTH}}{' ' * max(indent, 0)}{text}"


def _number_format(largest: float) -> Any:
    digits = 2 if largest >= 2**30 else 4
    return lambda size: f"{size / 2**30:,.{digits}f}"


def _bar(share: float, unicode_bars: bool) -> str:
    eighths = round(share * BAR_WIDTH * 8)
    if not unicode_bars:
        return "#" * round(share * BAR_WIDTH)
    return "█" * (eighths // 8) + PARTIAL_BLOCKS[eighths % 8].strip()
