"""Account of a run: the use of its time, its cost, and estimates for the rest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from trainctl.monitor.report.columns import GrowingColumns
from trainctl.monitor.report.history import AttemptTimes, History

RECENT_STEPS = 200
"""Number of last steps whose mean time predicts the rest."""


def account_of(
    history: History, *, stop_step: int | None, now: float | None, price: float | None
) -> dict[str, Any]:
    """Return seconds by use, and device hours and price, so far and to come.

    Args:
        stop_step: Last step of the newest attempt; None if no plan tells.
        now: Current time in Unix seconds, for a live run; None ends the run at its last record.
        price: Price of one device for an hour, in any currency; None leaves prices out.
    """
    attempts = [history.attempts[number] for number in sorted(history.attempts)]
    steps = history.steps
    kept = _seconds(steps)
    repeated = sum(_seconds(branch.steps) for branch in history.branches)
    ends = [attempt.last for attempt in attempts]
    if now is not None and ends:
        ends[-1] = max(ends[-1], now)
    wall = ends[-1] - attempts[0].launched if attempts else 0.0
    starting = sum(_starting(attempt) for attempt in attempts)
    between = sum(
        max(0.0, later.launched - earlier.last) for earlier, later in itertools.pairwise(attempts)
    )
    hours = sum(
        (attempt.ranks or 0) * max(0.0, end - attempt.launched) / 3600
        for attempt, end in zip(attempts, ends, strict=True)
    )
    ranks = attempts[-1].ranks or 0 if attempts else 0
    left = max(0, stop_step - history.last_step) if stop_step is not None else None
    recent = _recent(steps)
    seconds_left = left * recent if left is not None and math.isfinite(recent) else None
    hours_left = None if seconds_left is None else seconds_left * ranks / 3600
    found: dict[str, Any] = {
        "wall_seconds": wall,
        "kept_seconds": kept,
        "repeated_seconds": repeated,
        "starting_seconds": starting,
        "between_attempts_seconds": between,
        "other_seconds": max(0.0, wall - kept - repeated - starting - between),
        "repeated_steps": sum(len(branch.steps) for branch in history.branches),
        "attempts": len(attempts),
        "device_hours": hours,
        "device_hours_to_come": hours_left,
        "steps_to_come": left,
        "seconds_to_come": seconds_left,
        "tokens": _finite(steps.last("tokens")),
        "tokens_to_come": _tokens_left(steps, left),
        "parts": _parts(steps),
    }
    if price is not None:
        found["price"] = {
            "of_a_device_hour": price,
            "so_far": hours * price,
            "to_come": None if hours_left is None else hours_left * price,
            "repeated": _repeated_hours(history) * price,
        }
    return found


def _seconds(steps: GrowingColumns) -> float:
    return float(np.nansum(steps["seconds/total"])) if "seconds/total" in steps else 0.0


def _repeated_hours(history: History) -> float:
    """Return the device hours of repeated steps: their seconds times their attempt's ranks."""
    ranks = {number: attempt.ranks or 0 for number, attempt in history.attempts.items()}
    return sum(
        float(seconds) * ranks[int(number)] / 3600
        for branch in history.branches
        for number, seconds in zip(
            branch.steps["attempt"], branch.steps["seconds/total"], strict=True
        )
        if math.isfinite(seconds)
    )


def _starting(attempt: AttemptTimes) -> float:
    """Return the seconds before an attempt's first step; all of its time if it made no step."""
    until = attempt.last if attempt.first_step_began is None else attempt.first_step_began
    return max(0.0, until - attempt.launched)


def _recent(steps: GrowingColumns) -> float:
    totals = steps["seconds/total"][-RECENT_STEPS:]
    totals = totals[np.isfinite(totals)]
    return float(totals.mean()) if len(totals) else math.nan


def _tokens_left(steps: GrowingColumns, left: int | None) -> float | None:
    tokens = steps["tokens"][-RECENT_STEPS:]
    if left is None or len(tokens) < 2:
        return None
    return _finite(left * (tokens[-1] - tokens[0]) / (len(tokens) - 1))


def _parts(steps: GrowingColumns) -> dict[str, float]:
    """Return the seconds of the steps that count, by part of a step, with `other` last."""
    names = [name for name in steps.names if name.startswith("seconds/")]
    sums = {name.removeprefix("seconds/"): float(np.nansum(steps[name])) for name in names}
    total = sums.pop("total", None)
    if total is not None:
        sums["other"] = max(0.0, total - sum(sums.values()))
    return sums


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
