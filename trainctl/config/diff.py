"""The keys in which two configurations differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import RunConfig, walk


@dataclass(frozen=True, slots=True)
class Change:
    """One key with its two values."""

    key: str
    left: Any
    right: Any


def diff(a: RunConfig, b: RunConfig) -> list[Change]:
    """Every key whose value differs, in the schema's order."""
    return [
        Change(key, left, right)
        for (key, _, left), (_, _, right) in zip(walk(a), walk(b), strict=True)
        if left != right
    ]
