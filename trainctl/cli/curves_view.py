"""`trainctl runs follow`: the curves of a run in a terminal, redrawn while it trains."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import plotext

from trainctl.cli.console import print_data, to_printable
from trainctl.cli.record_lines import clock
from trainctl.monitor.report.columns import Numbers
from trainctl.monitor.report.history import History
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise_run

POLL_SECONDS = 1.0
READ_BYTES = 16 << 20
"""Bytes of records to read before each redraw: a long run is drawn before all of it is read."""

CURVES = ("loss", "grad_norm", "tokens_per_second", "learning_rate")
"""Curves in order of priority; as many are shown as fit."""
LEAST_COLUMNS, LEAST_ROWS = 56, 10
"""Least size of a chart, in characters."""
MOST_EVENTS = 6
FIRST_SHARE = 0.02
"""Share of the first steps that a curve's range ignores: their loss is far above the rest."""

_QUIET = ("launch", "checkpoint", "weights")
"""Marks that are shown only if there are no others."""


def follow_curves(run: RunPaths) -> None:
    """Redraw until the run ends or Ctrl-C; then print the last picture."""
    history = History(run)
    shown: list[str] = []
    with suppress(KeyboardInterrupt), _alternate_screen():
        while True:
            summary = summarise_run(run)
            is_behind = history.read(READ_BYTES)
            size = shutil.get_terminal_size()
            drawn = render_screen(history, summary, size.columns, size.lines)
            if drawn != shown:
                shown = drawn
                sys.stdout.write("\x1b[H" + "".join(f"{line}\x1b[K\r\n" for line in drawn[:-1]))
                sys.stdout.write(f"{drawn[-1]}\x1b[K\x1b[J")
                sys.stdout.flush()
            if not summary.is_live and not is_behind:
                break
            time.sleep(0.0 if is_behind else POLL_SECONDS)
    for line in shown:
        print_data(line)


def render_screen(history: History, summary: RunSummary, columns: int, rows: int) -> list[str]:
    """Return lines that fit the terminal: the run's state, its curves, its latest events."""
    head = [_cut_line(line, columns) for line in _head_lines(history, summary)]
    events = [_cut_line(line, columns) for line in _event_lines(history)]
    across = 2 if columns >= 2 * LEAST_COLUMNS else 1
    free = rows - len(head) - len(events) - 1
    names = [name for name in CURVES if name in history.steps]
    down = max(1, min(-(-len(names) // across), free // LEAST_ROWS))
    names = names[: across * down]
    lines = list(head)
    if len(history.steps) > 1 and names and free >= 5:
        height, width = free // -(-len(names) // across), columns // across
        for first in range(0, len(names), across):
            beside = [
                _chart_lines(history, name, width, height) for name in names[first : first + across]
            ]
            parts = zip(*beside, strict=True)
            lines += ["".join(part.ljust(width) for part in parts_).rstrip() for parts_ in parts]
    return [*lines, *events]


def _head_lines(history: History, summary: RunSummary) -> list[str]:
    of = f" of {summary.stop_step:,}" if summary.stop_step else ""
    lines = [f"{summary.path.name}: {summary.state}, step {history.last_step:,}{of}"]
    left = _seconds_left(history, summary)
    if left is not None and summary.is_live:
        lines[0] += f", {clock(left)} to go"
    if summary.message:
        lines.append(to_printable(summary.message))
    return lines


def _seconds_left(history: History, summary: RunSummary) -> float | None:
    """Estimate the seconds left from the last hundred steps, with what came between them."""
    times, steps = history.steps["time"][-100:], history.steps["step"][-100:]
    if len(times) < 2 or not summary.stop_step or steps[-1] <= steps[0]:
        return None
    return float((times[-1] - times[0]) / (steps[-1] - steps[0]) * (summary.stop_step - steps[-1]))


def _event_lines(history: History) -> list[str]:
    lines = []
    if "loss" in history.evaluations:  # a user's own program may log other values
        step, loss = history.evaluations.last("step"), history.evaluations.last("loss")
        lines.append(f"held-out loss {loss:.4f} at step {step:,.0f}")
    marks = [mark for mark in history.marks if mark.kind not in _QUIET] or history.marks
    for mark in marks[-MOST_EVENTS:]:
        lines.append(f"step {mark.step:>7,}  {to_printable(' '.join(mark.text.split()))}")
    return lines


def _chart_lines(history: History, name: str, width: int, height: int) -> list[str]:
    """Draw a curve in exactly `height` lines of at most `width` characters."""
    steps, values = average_in_buckets(history.steps["step"], history.steps[name], 2 * width)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width - 1, height)
    if len(steps) < 2:
        return [_cut_line(f"{name}: nothing yet", width), *[""] * (height - 1)]
    low, high = value_range(history.steps["step"], history.steps[name])
    inside = np.clip(values, low, high)
    figure.draw(figure.signal(list(steps), list(inside), marker="braille").lines())
    if name == "loss" and len(history.evaluations):
        known = np.clip(history.evaluations["loss"], low, high)
        at = history.evaluations["step"]
        good = np.isfinite(known) & (at >= steps[0])
        if good.any():
            figure.draw(figure.signal(list(at[good]), list(known[good]), marker="o"))
    levels = [low + (high - low) * quarter / 4 for quarter in range(5)]
    figure.ruler(1, 0).lim(low, high).ticks(levels, [f"{level:.4g}" for level in levels])
    marks = sorted({int(steps[0] + (steps[-1] - steps[0]) * mark / 4) for mark in range(5)})
    figure.ruler(0, 0).ticks(marks, [f"{mark:,}" for mark in marks])
    figure.title(f"{name.replace('_', ' ')} {history.steps[name][-1]:.4g}")
    lines = [line.rstrip() for line in plotext.uncolorize(str(figure.build())).splitlines()]
    return [*(line[:width] for line in lines[:height]), *[""] * (height - len(lines))]


def average_in_buckets(steps: Numbers, values: Numbers, most: int) -> tuple[Numbers, Numbers]:
    """Average a column's finite numbers, and their steps, in `most` buckets of neighbours."""
    good = np.isfinite(values)
    steps, values = steps[good], values[good]
    if len(steps) <= most:
        return steps, values
    starts = np.linspace(0, len(steps), most, endpoint=False).astype(np.int64)
    counts = np.diff(np.append(starts, len(steps)))
    return np.add.reduceat(steps, starts) / counts, np.add.reduceat(values, starts) / counts


def value_range(steps: Numbers, values: Numbers) -> tuple[float, float]:
    """Return the lowest and highest value to show, without the steep beginning of the curve."""
    good = values[np.isfinite(values)]
    later = good[int(len(good) * FIRST_SHARE) :] if len(good) > 1 / FIRST_SHARE else good
    low, high = (float(later.min()), float(later.max())) if len(later) else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5 * abs(low or 1), high + 0.5 * abs(high or 1))


def _cut_line(line: str, columns: int) -> str:
    return line if len(line) < columns else f"{line[: columns - 2]}…"


@contextmanager
def _alternate_screen() -> Iterator[None]:
    sys.stdout.write("\x1b[?1049h\x1b[?25l")
    try:
        yield
    finally:
        sys.stdout.write("\x1b[?25h\x1b[?1049l")
        sys.stdout.flush()
