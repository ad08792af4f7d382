"""Differences between plans, of runs or of a run's attempts, by configuration key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.schema import walk
from trainctl.plan.types import RunPlan

ABSENT = "not set"


def differences(plans: Sequence[RunPlan]) -> list[dict[str, Any]]:
    """Return each key that differs in meaning between plans, with its values as text.

    A null means the value that is derived for it.
    """
    sides = [_Side(plan) for plan in plans]
    keys = dict.fromkeys(key for side in sides for key in side.values)  # keys depend on kinds
    found = []
    for key in keys:
        meanings = [repr(side.meaning(key)) for side in sides]
        if len(set(meanings)) > 1:
            found.append({"key": key, "values": [side.shown(key) for side in sides]})
    return found


class _Side:
    def __init__(self, plan: RunPlan) -> None:
        self.values = {key: to_plain(value) for key, _, value in walk(plan.config)}
        self._derived = {item.key: to_plain(item.value) for item in plan.derived}

    def meaning(self, key: str) -> Any:
        value = self.values.get(key)
        return self._derived.get(key) if value is None else value

    def shown(self, key: str) -> str:
        if key not in self.values:
            return ABSENT
        value, derived = self.values[key], self._derived.get(key)
        if value is None:
            return "none" if derived is None else f"{derived} (derived)"
        return str(value)
