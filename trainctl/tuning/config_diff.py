"""Comparison of two configurations by meaning: recipes, runs, and DeepSpeed's own JSON files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.config.codec import flatten, to_plain
from trainctl.config.json_file import read_json
from trainctl.config.schema import RunConfig, walk_leaves
from trainctl.errors import TrainctlError
from trainctl.plans.types import RunPlan
from trainctl.rules.deepspeed_schema import load

ABSENT = "not set"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedConfig:
    """One of the two configurations."""

    name: str
    values: Mapping[str, Any] | None
    """Set values by config key, as plain data; None for a JSON file."""
    derived: Mapping[str, Any]
    """Derived values by config key, which replace values that are null."""
    deepspeed: Mapping[str, Any] | None
    """DeepSpeed's JSON with dotted keys; None if no plan can be made."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key with its two values, as plain data and as text."""

    key: str
    left: Any
    right: Any
    left_text: str
    right_text: str


def planned_config(name: str, config: RunConfig, plan: RunPlan | None) -> ComparedConfig:
    """Return a configuration to compare, with what its plan derives."""
    derived = {item.key: to_plain(item.value) for item in plan.derived} if plan else {}
    return ComparedConfig(
        name=name,
        values={key: to_plain(value) for key, _, value in walk_leaves(config)},
        derived=derived,
        deepspeed=dict(flatten(plan.deepspeed)) if plan and plan.deepspeed else None,
    )


def json_config(path: Path) -> ComparedConfig:
    """Read a file of DeepSpeed's JSON.

    Raises:
        TrainctlError: It cannot be read.
    """
    document = read_json(path)
    if not document.is_readable:
        raise TrainctlError.from_findings(document.findings)
    deepspeed = dict(flatten(document.value))
    return ComparedConfig(name=str(path), values=None, derived={}, deepspeed=deepspeed)


def compare(left: ComparedConfig, right: ComparedConfig) -> list[Difference]:
    """Return the keys whose values differ in effect.

    Two configurations are compared by trainctl's keys, where a null stands for its derived value.
    As soon as one side is a JSON file, both are compared as JSON, where a missing key stands for
    DeepSpeed's default.

    Raises:
        TrainctlError: A JSON file is compared with a configuration that gives no JSON.
    """
    if left.values is not None and right.values is not None:
        return _by_config(left, right)
    for side in (left, right):
        if side.deepspeed is None:
            raise TrainctlError(
                f"no JSON of DeepSpeed's can be made of {side.name}, so there is none to compare",
                hint=f"trainctl validate recipe={side.name}",
            )
    assert left.deepspeed is not None and right.deepspeed is not None
    return _by_json(left.deepspeed, right.deepspeed)


def _by_config(left: ComparedConfig, right: ComparedConfig) -> list[Difference]:
    assert left.values is not None and right.values is not None
    found = []
    for key in dict.fromkeys((*left.values, *right.values)):  # a kind may have keys of its own
        ours, theirs = left.values.get(key), right.values.get(key)
        in_both = key in left.values and key in right.values
        if in_both and (
            ours == theirs or _meaning_of_value(left, key) == _meaning_of_value(right, key)
        ):
            continue
        found.append(
            Difference(key, ours, theirs, _value_in_words(left, key), _value_in_words(right, key))
        )
    return found


def _meaning_of_value(side: ComparedConfig, key: str) -> Any:
    assert side.values is not None
    value = side.values[key]
    return side.derived.get(key) if value is None else value


def _value_in_words(side: ComparedConfig, key: str) -> str:
    assert side.values is not None
    if key not in side.values:
        return ABSENT
    value = side.values[key]
    if value is None and side.derived.get(key) is not None:
        return f"{side.derived[key]} (derived)"
    return str(value)


def _by_json(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    left, right = _canonical_keys(left), _canonical_keys(right)
    found = []
    for key in dict.fromkeys((*left, *right)):
        ours, theirs = _effective_setting(left, key), _effective_setting(right, key)
        if _normalized_value(key, ours) != _normalized_value(key, theirs):
            texts = (_json_text(left, key), _json_text(right, key))
            found.append(Difference(key, left.get(key), right.get(key), *texts))
    return found


def _canonical_keys(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Rename keys to the spelling that DeepSpeed documents, and drop empty sections."""
    keys = load().keys
    renamed = {}
    for key, value in flat.items():
        head, dot, rest = key.partition(".")
        known = keys.get(key) or keys.get(head)
        if known is not None and known.same_as:
            key = known.same_as + (f"{dot}{rest}" if known.name == head and rest else "")
        renamed[key] = value
    # An empty section means the same as a missing one.
    return {key: value for key, value in renamed.items() if value != {}}


def _effective_setting(flat: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, or DeepSpeed's default if the key is missing."""
    if key in flat:
        return flat[key]
    known = load().keys.get(key)
    return None if known is None else known.default


def _normalized_value(key: str, value: Any) -> Any:
    known = load().keys.get(key)
    ignores_case = (known is not None and known.any_case) or key.endswith("optimizer.type")
    return value.lower() if ignores_case and isinstance(value, str) else value


def _json_text(flat: Mapping[str, Any], key: str) -> str:
    if key in flat:
        return str(flat[key])
    default = _effective_setting(flat, key)
    return ABSENT if default is None else f"{default} (DeepSpeed's default)"
