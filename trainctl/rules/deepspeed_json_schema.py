"""JSON Schema (draft 2020-12) of DeepSpeed's JSON, from the schema of the installed version."""

from __future__ import annotations

from typing import Any

from trainctl.rules.deepspeed_schema import Key, Schema, load

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
        **_section(schema, (), unknown="refused"),
    }


def _section(schema: Schema, path: tuple[str, ...], *, unknown: str) -> dict[str, Any]:
    properties = {}
    for name in schema.inside(path):
        key = schema.find((*path, name))
        assert key is not None
        properties[name] = _key(schema, key, (*path, name))
    return {
        "type": "object",
        "properties": properties,
        **({} if unknown == "free" else {"additionalProperties": False}),
    }


def _key(schema: Schema, key: Key, path: tuple[str, ...]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if key.replaced:
        notes = {"deprecated": True, "description": f"Deprecated: use {key.replaced}."}
    if key.same_as:
        notes["description"] = f"Another spelling of {key.same_as}."
    if key.is_section:
        section = _section(schema, path, unknown=key.unknown)
        if key.null:
            section["type"] = ["object", "null"]
        return {**notes, **section}
    if key.default is not None:
        notes["default"] = key.default
    return {**notes, "anyOf": [*_values(key), {"const": "auto"}]}


def _values(key: Key) -> list[dict[str, Any]]:
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
