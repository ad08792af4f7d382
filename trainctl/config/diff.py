"""Difference of two configurations, by key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import RunConfig, walk


@dataclass(frozen=True, slots=True)
class Change:
    """A key with its values in both configurations."""

    key: str
    left: Any
    right: Any


def diff(a: RunConfig, b: RunConfig) -> list[Change]:
    """Return every key whose value differs, in the schema's order.

    A key that one configuration's kind does not have is None there.
    """
    left, right = ({key: value for key, _, value in walk(each)} for each in (a, b))
    return [
        Change(key, left.get(key), right.get(key))
        for key in dict.fromkeys([*left, *right])
        if left.get(key) != right.get(key)
    ]
