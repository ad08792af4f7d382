"""Conversion of dataclasses to plain data (JSON, YAML) and back, by their type hints.

It needs the standard library only: the run directory's `config.yaml` and an attempt's `plan.json`
are read by processes that must not import Hydra.
"""

from __future__ import annotations

import types
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cache
from inspect import get_annotations
from typing import Any, ClassVar, TypeVar, Union, cast, get_args, get_origin

from trainctl.config.registry import (
    kind_key,
    kind_of,
    own_fields,
    own_keys,
    part_class,
    section_class,
    with_parts,
)

T = TypeVar("T")

_PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types returned unchanged. Subclasses, such as an `Enum`'s, are not included."""


def to_plain(value: Any) -> Any:
    """Convert to nested dicts, lists, strings, numbers, booleans and None."""
    if type(value) in _PLAIN:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: to_plain(inner)
            for item in own_fields(value)
            if (inner := getattr(value, item.name)) or not item.metadata.get("left_out_if_empty")
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(cls: type[T], data: Any, key: str = "") -> T:
    """Return an instance of the dataclass `cls` from the output of `to_plain`.

    Keys missing from `data` keep their defaults, so that a newer version reads an older file. In a
    section with kinds, keys of other kinds are ignored, because older files have all of them.

    Raises:
        ValueError: An unknown key, or a value of the wrong type; names the key.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{key or cls.__name__} must be a mapping, not {type(data).__name__}")
    data = {name: value for name, value in data.items() if name not in getattr(cls, "former", ())}
    group = getattr(cls, "units", "")
    if group:
        cls, data = _class_of_kind(group, cls, data)
    has_parts = bool(getattr(cls, "parts", ""))
    cls = with_parts(cast(Any, cls)) if has_parts else cls
    hints = attribute_types(cast(Any, cls))
    if has_parts:  # drop sections of packages not installed here
        data = {k: v for k, v in data.items() if k in hints or not isinstance(v, dict)}
    known = {item.name for item in own_fields(cls)}
    unknown = [str(name) for name in data if name not in known]
    if unknown:
        raise ValueError(f"unknown key {_join_key(key, unknown[0])}")
    return cls(
        **{name: _read_value(hints[name], data[name], _join_key(key, name)) for name in data}
    )


def _class_of_kind(group: str, cls: Any, data: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the class for the section's kind, and the section's data without foreign keys."""
    key = kind_key(group)
    kind = data.get(key, kind_of(cls))
    if not isinstance(kind, str):
        raise ValueError(f"{group}.{key} must be a name, not {kind!r}")
    is_part = getattr(cls, "is_part", False)
    found = part_class(cls, kind) if is_part else section_class(group, kind)
    foreign = own_keys(group) - set(attribute_types(found))
    kept = {name: value for name, value in data.items() if name not in foreign}
    return found, {key: kind, **kept}


def flatten(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf; an empty mapping is a leaf."""
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nest(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return nested mappings of dotted keys with their values."""
    nested: dict[str, Any] = {}
    for key, value in leaves:
        *parents, name = key.split(".")
        level = nested
        for parent in parents:
            level = level.setdefault(parent, {})
        level[name] = value
    return nested


def value_at(section: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dataclasses and mappings."""
    for name in key.split("."):
        section = section[name] if isinstance(section, Mapping) else getattr(section, name)
    return section


@cache
def attribute_types(cls: Any) -> dict[str, Any]:
    """Return the types of a class's attributes, without `ClassVar`s."""
    found = ChainMap(*map(_own_attribute_types, cls.__mro__))
    return {name: hint for name, hint in found.items() if get_origin(hint) is not ClassVar}


@cache
def _own_attribute_types(cls: Any) -> dict[str, Any]:
    """Return the annotations of this class alone; cached, because kinds share base classes."""
    return get_annotations(cls, eval_str=True)


def _join_key(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _read_value(hint: Any, value: Any, key: str) -> Any:
    if hint is Any or type(value) is hint:  # most values: strings, numbers, booleans
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [item for item in get_args(hint) if item is not type(None)]
        return _read_value(inner, value, key)
    if origin in (list, tuple) and not isinstance(value, (list, tuple)):
        raise ValueError(f"{key}: expected a list, got {value!r}")
    if origin is dict and not isinstance(value, dict):
        raise ValueError(f"{key}: expected a mapping, got {value!r}")
    if origin is list:
        return [_read_value(get_args(hint)[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        return tuple(
            _read_value(get_args(hint)[0], item, f"{key}[{i}]") for i, item in enumerate(value)
        )
    if origin is dict:
        return {
            name: _read_value(get_args(hint)[1], item, _join_key(key, name))
            for name, item in value.items()
        }
    if is_dataclass(hint):
        return from_plain(cast(type, hint), value, key)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"{key}: {value!r} is none of {[m.value for m in hint]}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ValueError(f"{key}: it has more digits than a number may have") from None
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ValueError(f"{key}: expected {hint.__name__}, got {value!r}")
    return value
