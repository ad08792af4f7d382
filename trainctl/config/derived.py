"""A value that nobody typed: what it is, why, and what it follows from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A value that nobody typed, and why it is what it is."""

    key: str
    """Name that users ask for: a config key (`training.global_batch_size`), a key of DeepSpeed's
    JSON (`train_batch_size`), or a quantity of the plan (`total_steps`)."""
    value: Any
    reason: str
    """The arithmetic or the rule, with the numbers."""
    sources: tuple[str, ...] = ()
    """Config keys that it follows from, the foremost first; empty in the plans of versions that did
    not record them."""
