"""Metrics of records: one name for each, the same with every logger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.options.logger import Point
from trainctl.runs.records import Event, number

TRAIN = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "learning_rates": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "grad_norms": "train/grad_norm",
    "clip_at": "train/clip_at",
    "z_loss": "train/z_loss",
    "experts": "train/experts",
    "objective": "train/objective",
    "loss_scale": "train/loss_scale",
    "tokens": "train/tokens",
    "sources": "train/samples",
    "tokens_per_second": "throughput/tokens_per_second",
    "mfu": "throughput/mfu",
    "seconds": "seconds",
    "peak_bytes": "memory/peak_bytes",
    "values": "train",
}
EVALUATION = {
    "loss": "evaluation/loss",
    "ema_loss": "evaluation/ema_loss",
    "objective": "evaluation/objective",
    "sources": "evaluation/loss",
    "values": "evaluation",
}
KINDS = {"step": ("train", TRAIN), "evaluation": ("evaluation", EVALUATION)}
"""Kinds of records that have metrics: the kind of their points, and their fields with the names of
the metrics. A field that is a mapping or a list gives one metric per entry, such as
`seconds/total`.
"""

CALLBACK = "callback"
"""Kind of the records of callbacks, whose metrics are `CALLBACK/NAME/KEY`."""


def point_of(event: Event, place: int) -> Point | None:
    """Return the point with the metrics of a record; None if it has no metrics.

    Args:
        place: Number of the point.
    """
    if not isinstance(event.get("step"), int):
        return None
    if event["event"] == CALLBACK:  # each name is a series of its own
        kind = f"{event['callback']}/{event['name']}"
        names = {"values": kind}
    elif event["event"] in KINDS:
        kind, names = KINDS[event["event"]]
    else:
        return None
    values = {
        name: value
        for field, prefix in names.items()
        for name, value in _numbers(prefix, event.get(field))
    }
    time = float(event.get("time", 0.0))
    return Point(number=place, kind=kind, step=event["step"], time=time, values=values)


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield names and numbers in a field, NaN and infinities included; omit other values."""
    if isinstance(value, Mapping):
        for part, item in value.items():
            yield from _numbers(f"{name}/{part}", item)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(f"{name}/{index}", item)
    elif isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity"):
        yield name, number(value)
