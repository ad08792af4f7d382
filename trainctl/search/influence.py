"""Influence of a configuration key: the derived values and JSON keys that depend on it.

Two methods complement each other: the declared sources of a derived value, and a changed value of
the key with everything else equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, get_args

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.derived import Derived
from trainctl.config.keys import Leaf, ValueProblem, accept, leaves
from trainctl.config.registry import kind_of
from trainctl.config.schema import RunConfig
from trainctl.hardware import resolve_hardware
from trainctl.plan.types import RunPlan
from trainctl.rules.resolve import resolve


def depending_on(key: str, plan: RunPlan) -> list[Derived]:
    """Return the derived values of a plan that depend on a key, in the plan's order."""
    moved = _moved(key, plan)
    return [
        item
        for item in plan.derived
        if item.key != key and (key in item.sources or item.key in moved)
    ]


def _moved(key: str, plan: RunPlan) -> set[str]:
    """Return the names of the derived values that another value of the key would change."""
    before = {item.key: item.value for item in plan.derived}
    kinds = leaves()[key].kinds
    if kinds and kind_of(getattr(plan.config, key.partition(".")[0])) not in kinds:
        return set()
    for value in _other_values(leaves()[key], _value(plan.config, key)):
        plain = deepcopy(to_plain(plan.config))
        *parents, last = key.split(".")
        node = plain
        for name in parents:
            node = node[name]
        node[last] = value
        config = from_plain(RunConfig, plain)
        is_hardwares = key.startswith("hardware.")
        hardware = resolve_hardware(config.hardware) if is_hardwares else plan.hardware
        other = resolve(config, hardware).plan
        if other is not None:
            after = {item.key: item.value for item in other.derived}
            return {name for name in before if name in after and before[name] != after[name]}
    return set()


def _value(config: RunConfig, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return to_plain(node)


def _other_values(leaf: Leaf, value: Any) -> Iterator[Any]:
    """Yield a few legal values other than the key's own; none for names, lists and mappings."""
    candidates: list[Any] = []
    if isinstance(value, (list, dict)):
        return
    kinds = [kind for kind in get_args(leaf.hint) or (leaf.hint,) if isinstance(kind, type)]
    kind = next((each for each in kinds if each is not type(None)), str)
    if kind is bool:
        candidates = [not value]
    elif kind is int:
        candidates = [2 * value, value + 1, value // 2, value - 1] if value is not None else [1, 2]
    elif kind is float:
        candidates = [value / 2, value * 2, 0.5] if value is not None else [0.5, 2.0]
    elif leaf.choices:
        candidates = [*leaf.choices]
    if type(None) in kinds:
        candidates.append(None)
    for candidate in candidates:
        try:
            accepted = accept(leaf, candidate)
        except ValueProblem:
            continue
        if accepted != value:
            yield accepted
