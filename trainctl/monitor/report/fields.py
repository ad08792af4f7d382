"""Fields of records that are drawn, and the names of their curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.runs.records import Event, number

STEP = (
    "loss",
    "learning_rate",
    "grad_norm",
    "clip_at",
    "tokens",
    "tokens_per_second",
    "mfu",
    "loss_scale",
    "z_loss",
)
"""Fields of a `step` record that are single numbers."""

PARTS = {
    "seconds": "seconds",
    "peak_bytes": "peak",
    "objective": "objective",
    "values": "values",
}
"""Fields that map names to numbers, with the prefix of the curve's name: `seconds/forward`."""

_NAMES: dict[str, dict[str, str]] = {field: {} for field in PARTS}
"""Cache of the full names of the parts seen so far."""

OTHER_RATES = "learning_rates"
"""Learning rates of parameter groups; drawn where they differ from the run's."""

EVALUATION = ("loss", "ema_loss")


def of_step(event: Event) -> dict[str, float]:
    """Return the numbers of a `step` record, with `step` and `time`; omit missing ones."""
    found = _placed(event)
    # Fast path for plain floats: there may be a million records.
    for name in STEP:
        value = event.get(name)
        if type(value) is float:
            found[name] = value
        elif value is not None:
            _add(found, name, value)
    for field, names in _NAMES.items():
        parts = event.get(field)
        if type(parts) is dict:
            for name, value in parts.items():
                if value is not None:
                    full = names.get(name) or names.setdefault(name, f"{PARTS[field]}/{name}")
                    _add(found, full, value)
    rates = event.get(OTHER_RATES)
    if isinstance(rates, Mapping):
        for name, value in rates.items():
            if value != event.get("learning_rate"):
                _add(found, f"learning_rate/{name}", value)
    return found


def of_evaluation(event: Event) -> dict[str, float]:
    """Return the numbers of an `evaluation` record, each source's included: `loss/NAME`."""
    found = _placed(event)
    for name in EVALUATION:
        if event.get(name) is not None:
            _add(found, name, event[name])
    for name, value in _items(event.get("sources")):
        _add(found, f"loss/{name}", value)
    for name, value in _items(event.get("objective")):
        _add(found, f"objective/{name}", value)
    return found


def _placed(event: Event) -> dict[str, float]:
    """Return step and time; every record has a time, unless a person has edited it."""
    time = event.get("time")
    return {"step": event["step"], "time": time if isinstance(time, int | float) else 0.0}


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()


def _add(found: dict[str, float], name: str, value: Any) -> None:
    """Add a number, or the string that stands for one; ignore values of other types."""
    if type(value) is float:
        found[name] = value
    elif type(value) is int or value in ("NaN", "Infinity", "-Infinity"):
        found[name] = number(value)
