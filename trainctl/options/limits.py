"""Limits: keys of which only some values can be combined with another setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainctl.config.codec import value_at
from trainctl.config.keys import as_written
from trainctl.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A key of which an engine, or another setting, supports only some values."""

    key: str
    holds: Callable[[RunConfig], bool]
    """Returns True if a configuration keeps to the limit."""
    why: str
    """Reason for the limit; for an engine a sentence without its subject, the engine."""
    nearest: str
    """Setting to type instead."""


def only_value(key: str, value: object, why: str, nearest: str = "") -> Limit:
    """Return the limit that a key has one value. `nearest` is by default the key with the value."""
    near = nearest or f"{key}={as_written(value)}"
    return Limit(
        key=key, holds=lambda config: value_at(config, key) == value, why=why, nearest=near
    )


def never_value(key: str, value: object, why: str, nearest: str) -> Limit:
    """Return the limit that a key does not have a value."""
    return Limit(
        key=key, holds=lambda config: value_at(config, key) != value, why=why, nearest=nearest
    )
