"""Closed schema of DeepSpeed's JSON: every key with its type, default and range.

This folder has one file per version of DeepSpeed, written by
`scripts/generate_deepspeed_schema.py` from the installed package. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import Any

Path = tuple[str, ...]
"""Path of a value in the JSON: `("zero_optimization", "stage")`."""

FOLDER = FilePath(__file__).parent


@dataclass(frozen=True, slots=True)
class Key:
    """Key of the JSON."""

    name: str
    type: str
    """`integer`, `number`, `boolean`, `string`, `list`, `section`, or `any`."""
    default: Any = None
    """DeepSpeed's default; None if it depends on other keys."""
    choices: tuple[Any, ...] = ()
    """Legal values; empty if every value of the type is legal."""
    any_case: bool = False
    """Whether DeepSpeed ignores the case of a choice."""
    items: tuple[Any, ...] = ()
    """Legal items of a list; empty if every item is legal."""
    minimum: float | None = None
    """Smallest legal value, inclusive."""
    maximum: float | None = None
    """Largest legal value, inclusive."""
    above: float | None = None
    below: float | None = None
    null: bool = False
    """Whether null is legal."""
    checked: bool = False
    """Whether DeepSpeed itself refuses a wrong type (in sections that are pydantic models).
    Otherwise a wrong value is used unchecked.
    """
    refuses_switch: bool = False
    """Whether a number in a checked section may not be true or false."""
    unknown: str = ""
    """Treatment of an unknown key in the section: `refused`, `ignored`, or `free` if the section
    may hold any key.
    """
    replaced: str = ""
    """Replacement of a deprecated key; empty for other keys."""
    sets_replacement: bool = False
    """Whether DeepSpeed copies a deprecated key's value to its replacement."""
    same_as: str = ""
    """Canonical name, if this key is an alternative spelling; empty otherwise."""

    @property
    def is_section(self) -> bool:
        return self.type == "section"


@dataclass(frozen=True, slots=True)
class Arguments:
    """Arguments of a schedule: all names, and the names without a default."""

    names: tuple[str, ...]
    required: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """Schema of the JSON of one version of DeepSpeed."""

    deepspeed: str
    """Version of DeepSpeed."""
    torch: str
    """Version of torch whose optimizers and schedules are listed."""
    keys: Mapping[str, Key]
    """Every key, by its dotted name."""
    removed: Mapping[str, str]
    """Keys that DeepSpeed has removed and refuses, each with its replacement."""
    optimizers: Mapping[str, Mapping[str, tuple[str, ...]]]
    """DeepSpeed's own optimizers, by lower-case name: the names in `optimizer.params` for each
    variant (`device`, `offloaded`, `torch`); no variants if another package provides the optimizer.
    """
    torch_optimizers: Mapping[str, tuple[str, ...]]
    """Classes of torch.optim, each with its names in `optimizer.params`."""
    schedulers: Mapping[str, Arguments]
    """DeepSpeed's schedules, each with its arguments in `scheduler.params`."""
    torch_schedulers: Mapping[str, Arguments]
    """Classes of torch.optim.lr_scheduler, each with its arguments in `scheduler.params`."""

    def find(self, path: Path) -> Key | None:
        """Return the key at a path; None if it does not exist or a name contains a dot."""
        if any("." in name for name in path):
            return None
        return self.keys.get(".".join(path))

    def inside(self, section: Path) -> list[str]:
        """Return the names of the keys in a section; for the empty path, of the whole JSON."""
        prefix = "".join(f"{name}." for name in section)
        names = (key[len(prefix) :] for key in self.keys if key.startswith(prefix))
        return [name for name in names if "." not in name]


def versions() -> list[str]:
    """Return the versions of DeepSpeed that have a schema, the oldest first."""
    found = [path.stem for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


@cache
def load(version: str | None = None) -> Schema:
    """Return the schema of a version; the newest by default."""
    path = FOLDER / f"{version or versions()[-1]}.json"
    plain = json.loads(path.read_text(encoding="utf-8"))
    return Schema(
        deepspeed=plain["deepspeed"],
        torch=plain["torch"],
        keys={name: _make_key(name, note) for name, note in plain["keys"].items()},
        removed=plain["removed"],
        optimizers={
            name: {variant: tuple(names) for variant, names in variants.items()}
            for name, variants in plain["optimizers"].items()
        },
        torch_optimizers={k: tuple(names) for k, names in plain["torch_optimizers"].items()},
        schedulers={name: _make_arguments(note) for name, note in plain["schedulers"].items()},
        torch_schedulers={
            k: _make_arguments(note) for k, note in plain["torch_schedulers"].items()
        },
    )


def _make_key(name: str, note: Mapping[str, Any]) -> Key:
    lists = {part: tuple(note[part]) for part in ("choices", "items") if part in note}
    return Key(name=name, **{**note, **lists})


def _make_arguments(note: Mapping[str, list[str]]) -> Arguments:
    return Arguments(tuple(note["names"]), tuple(note["required"]))


DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TYPES = {
    "integer": ["integer"],
    "number": ["number"],
    "boolean": ["boolean"],
    "string": ["string"],
    "list": ["array"],
    "section": ["object"],
}


def deepspeed_schema() -> dict[str, Any]:
    """Return the JSON Schema of a `ds_config.json`: every key's type, range, default, replacement.

    It refuses unknown keys even where DeepSpeed would ignore them silently. It accepts "auto"
    everywhere except for sections, because transformers and accelerate fill it in.
    """
    schema = load()
    return {
        "$schema": DIALECT,
        "title": f"The configuration of DeepSpeed {schema.deepspeed}",
        **_section_schema(schema, (), unknown="refused"),
    }


def _section_schema(schema: Schema, path: tuple[str, ...], *, unknown: str) -> dict[str, Any]:
    properties = {}
    for name in schema.inside(path):
        key = schema.find((*path, name))
        assert key is not None
        properties[name] = _key_schema(schema, key, (*path, name))
    return {
        "type": "object",
        "properties": properties,
        **({} if unknown == "free" else {"additionalProperties": False}),
    }


def _key_schema(schema: Schema, key: Key, path: tuple[str, ...]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if key.replaced:
        notes = {"deprecated": True, "description": f"Deprecated: use {key.replaced}."}
    if key.same_as:
        notes["description"] = f"Another spelling of {key.same_as}."
    if key.is_section:
        section = _section_schema(schema, path, unknown=key.unknown)
        if key.null:
            section["type"] = ["object", "null"]
        return {**notes, **section}
    if key.default is not None:
        notes["default"] = key.default
    return {**notes, "anyOf": [*_value_schemas(key), {"const": "auto"}]}


def _value_schemas(key: Key) -> list[dict[str, Any]]:
    nothing = [{"type": "null"}] if key.null or key.default is None else []
    if key.type not in _TYPES:
        return [{}]
    if key.choices:
        if key.any_case:
            pattern = "|".join(_either_case(str(choice)) for choice in key.choices)
            return [{"type": "string", "pattern": f"^({pattern})$"}, *nothing]
        return [{"enum": list(key.choices)}, *nothing]
    bounds = {
        "minimum": key.minimum,
        "maximum": key.maximum,
        "exclusiveMinimum": key.above,
        "exclusiveMaximum": key.below,
    }
    limits = {name: bound for name, bound in bounds.items() if bound is not None}
    items = {"items": {"enum": list(key.items)}} if key.items else {}
    return [{"type": _TYPES[key.type], **limits, **items}, *nothing]


def _either_case(word: str) -> str:
    return "".join(f"[{c.lower()}{c.upper()}]" if c.isalpha() else c for c in word)
