"""Derived values, each with its reason and sources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DerivedValue:
    """A value that the user did not set, and its derivation."""

    key: str
    """Name that users ask for: a config key (`training.global_batch_size`), a key of DeepSpeed's
    JSON (`train_batch_size`), or a quantity of the plan (`total_steps`).
    """
    value: Any
    reason: str
    """The arithmetic or the rule, with its numbers."""
    sources: tuple[str, ...] = ()
    """Config keys that it follows from, the most important first; empty in plans of versions that
    did not record them.
    """


def derived(key: str, value: Any, *sources: str, why: str = "") -> DerivedValue:
    """Return a value derived from config keys; `why` replaces their names as the reason."""
    return DerivedValue(key=key, value=value, reason=why or " and ".join(sources), sources=sources)
