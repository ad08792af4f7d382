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
    """Return every key whose value differs, in the schema's order; what a kind does not have is
    null."""
    left, right = ({key: value for key, _, value in walk(each)} for each in (a, b))
    return [
        Change(key, left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]
