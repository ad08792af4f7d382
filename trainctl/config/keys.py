"""Table of all legal keys, with types and defaults, and parsing of their values."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin

from trainctl.config.codec import attribute_types, to_plain
from trainctl.config.quantities import in_unit, suffixes, without_suffix
from trainctl.config.registry import (
    kind_key,
    kind_of,
    list_kinds,
    new_section,
    own_fields,
    part_class,
    section_class,
    unit_groups,
)
from trainctl.config.schema import RunConfig
from trainctl.config.suggest import (
    explain_address,
    join_alternatives,
    nearest_names,
    variant_hint,
)

LARGEST_INTEGER = 2**63 - 1
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf key of the schema, such as `training.seed`."""

    key: str
    hint: Any
    default: Any
    """Default, as plain data."""
    metadata: Mapping[str, Any]
    """Doc, unit and range, from `schema.option`."""
    kinds: tuple[str, ...] = ()
    """Options of the group that have this key, if the options are kinds; empty if all have it."""

    @property
    def is_mapping(self) -> bool:
        """Whether the key is a free-form mapping, such as `deepspeed`."""
        return get_origin(self.hint) is dict

    @property
    def part(self) -> type | None:
        """Base class of the named sections under the key, as under `data.sources`; None without."""
        inner = get_args(self.hint)[1] if self.is_mapping else None
        return inner if getattr(inner, "is_part", False) else None

    @property
    def is_text_mapping(self) -> bool:
        """Whether the key is a mapping of strings, such as `launcher.environment`."""
        return self.is_mapping and get_args(self.hint)[1] is str

    @property
    def choices(self) -> tuple[str, ...]:
        """Legal values, if the key names an option of a group or a member of an enumeration."""
        if self.metadata.get("units"):
            return list_kinds(self.metadata["units"])
        kinds = [each for each in (self.hint, *get_args(self.hint)) if isinstance(each, type)]
        return tuple(
            str(member.value) for kind in kinds if issubclass(kind, Enum) for member in kind
        )


class ValueProblem(Exception):
    """A value that its key does not accept; the hint names the nearest legal value, or all."""

    def __init__(self, message: str, hint: str = "", *, out_of_range: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.out_of_range = out_of_range


@cache
def leaves() -> dict[str, Leaf]:
    """Return every key of the schema by its dotted name, in the schema's order.

    Where a section has several kinds, the table has the keys of all of them. A key that several
    kinds share is described by the default kind, or else by the first kind that has it.
    """
    table: dict[str, Leaf] = {}
    _collect_leaves(RunConfig(), "", table)
    return table


def keys_of(group: str, kind: str) -> dict[str, Leaf]:
    """Return the keys of a group's section under one kind, by dotted name."""
    return _leaves_in(new_section(group, kind), f"{group}.")


def leaves_under(plain: Mapping[str, Any]) -> dict[str, Leaf]:
    """Return the keys of a configuration, given as plain data, under the kinds that it chooses."""
    table = {key: leaf for key, leaf in leaves().items() if not leaf.kinds}
    for group in unit_groups():
        table |= keys_of(group, plain[group][kind_key(group)])
    return table


@cache
def sections() -> frozenset[str]:
    """Return the names of all sections: the groups, and `training`."""
    return frozenset(key.partition(".")[0] for key in leaves() if "." in key)


def find_leaf(path: tuple[str, ...]) -> Leaf | None:
    """Return the key at a path, or the free-form mapping that the path leads into.

    None if the path is unknown.
    """
    for length in range(len(path), 0, -1):
        leaf = leaves().get(".".join(path[:length]))
        if leaf is not None and leaf.key.count(".") == length - 1:
            if leaf.part is not None and len(path) > length + 1:
                return _leaf_of_part(leaf.part, path, length + 2)
            return leaf if length == len(path) or leaf.is_mapping else None
    return None


def is_named_section(path: tuple[str, ...]) -> bool:
    """Return True for the path of a section under a name of the user's, such as a reward."""
    leaf = find_leaf(path)
    has_sections = leaf is not None and (leaf.part is not None or leaf.metadata.get("each"))
    return leaf is not None and bool(has_sections) and len(path) == leaf.key.count(".") + 2


def is_removal(path: tuple[str, ...], value: Any) -> bool:
    """Return True if setting a key to a value removes a named section, or all of a mapping's."""
    leaf = find_leaf(path) if value is None else None
    depth = 0 if leaf is None or leaf.part is None else leaf.key.count(".") + 1
    return depth > 0 and len(path) <= depth + 1


def described_leaf(path: tuple[str, ...]) -> Leaf | None:
    """Return the key at a path as `find_leaf`, or the key of an option's own section there."""
    leaf = find_leaf(path)
    group = leaf.metadata.get("each") if leaf is not None else None
    if leaf is None or not group:
        return leaf
    name, *inside = path[leaf.key.count(".") + 1 :] or ("",)
    own = option_leaves(group, name) if inside and name in list_kinds(group) else {}
    return own.get(inside[0], leaf) if inside else leaf


@cache
def part_leaves(part: type) -> dict[str, Leaf]:
    """Return the keys of a named section, such as `data.sources.NAME`, over all its kinds."""
    found: dict[str, Leaf] = {}
    for kind in list_kinds(part.units):  # type: ignore[attr-defined]
        for name, leaf in part_leaves_of(part, kind).items():
            having = (*found[name].kinds, kind) if name in found else (kind,)
            found[name] = replace(found.get(name, leaf), kinds=having)
    return found


@cache
def part_leaves_of(part: type, kind: str) -> dict[str, Leaf]:
    """Return the keys of a named section under one kind."""
    return _leaves_in(part_class(part, kind)())


@cache
def option_leaves(group: str, name: str) -> dict[str, Leaf]:
    """Return the keys of an option's own section, such as `data.filters.c4`, by key name."""
    return _leaves_in(section_class(group, name)())


def _leaves_in(section: Any, prefix: str = "") -> dict[str, Leaf]:
    hints = attribute_types(section.__class__)
    found = (
        Leaf(
            f"{prefix}{item.name}",
            hints[item.name],
            to_plain(getattr(section, item.name)),
            item.metadata,
        )
        for item in own_fields(section)
    )
    return {leaf.key: leaf for leaf in found}


def _leaf_of_part(part: type, path: tuple[str, ...], length: int) -> Leaf | None:
    """Return the key of a named section, whose dotted name is the first `length` names of `path`.

    None if the section has no such key.
    """
    leaf = part_leaves(part).get(path[length - 1])
    if leaf is None or (len(path) > length and not leaf.is_mapping):
        return None
    return replace(leaf, key=".".join(path[:length]))


def convert_value(leaf: Leaf, value: Any, text: str | None = None) -> Any:
    """Convert a value to its key's type, as plain data.

    Args:
        value: The value as the YAML or override parser read it.
        text: The value as written: a string key keeps `007` unchanged.

    Raises:
        ValueProblem: The value has another type, or is out of range.
    """
    if leaf.metadata.get("units"):
        return _require_names(leaf, value, text)
    if leaf.metadata.get("each"):
        return _convert_each(leaf, value)
    unit = leaf.metadata.get("unit") or ""
    value = without_suffix(value, unit, is_count=_is_count(leaf.hint))
    try:
        accepted = _convert(leaf.hint, value, text, leaf.default)
    except ValueProblem as wrong:
        if wrong.hint:
            raise
        raise ValueProblem(wrong.message, _as_typed(leaf, value)) from None
    problem = range_problem(leaf.metadata, accepted)
    if (
        leaf.metadata.get("local")
        and isinstance(accepted, str)
        and (told := explain_address(accepted))
    ):
        problem = ValueProblem(*told)
    if problem:
        raise problem
    return accepted


def as_written(value: Any) -> str:
    """Format a value the way YAML files and overrides spell it."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, dict):
        inside = ", ".join(f"{name}: {as_written(item)}" for name, item in value.items())
        return f"{{{inside}}}"
    return "null" if value is None else str(value)


def as_override(value: Any) -> str:
    """Format a value in the grammar of Hydra overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{name}: {as_override(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_override, value)) + "]"
    if isinstance(value, str):
        return value if value.isidentifier() else json.dumps(value, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _as_typed(leaf: Leaf, value: Any) -> str:
    """Return the hint for a value of the wrong type.

    It gives the value that was probably meant, else the key's example, else the expected type.
    """
    example, unit = leaf.metadata.get("example"), leaf.metadata.get("unit") or ""
    if example:
        return f"as in '{leaf.key}={example}'"
    if get_origin(leaf.hint) in (list, dict):
        return "write it as [a,b]" if get_origin(leaf.hint) is list else "write it as {key: value}"
    kinds, is_count = get_args(leaf.hint) or (leaf.hint,), _is_count(leaf.hint)
    meant = in_unit(value, unit, is_count=is_count) if isinstance(value, str) else None
    is_whole = meant is not None and (meant == int(meant) or not is_count)
    if meant is not None and is_whole and range_problem(leaf.metadata, meant) is None:
        return f"write {_number_text(meant)}" + (f" ({unit})" if unit else "")
    what = _type_in_words(kinds[0])
    what += f", in {unit}" if unit else ", such as 0.1 or 1e-4" if float in kinds else ""
    names = suffixes(unit, is_count=is_count)
    what += f", or with {join_alternatives(names)} behind it" if names else ""
    return what + (", or null" if type(None) in kinds else "")


def _is_count(hint: Any) -> bool:
    """Return True if a key takes no fractions."""
    return float not in (get_args(hint) or (hint,))


RANGE = ("minimum", "maximum", "above")
"""Names of the bounds of a number in a key's metadata."""


def range_problem(metadata: Mapping[str, Any], value: Any) -> ValueProblem | None:
    """Check a number against the range of its key; the problem names the nearest legal value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    unit = f" {metadata['unit']}" if metadata.get("unit") else ""
    least, most, above = (metadata.get(name) for name in RANGE)
    if least is not None and value < least:
        return _out_of_range_problem(
            f"{value} is below the smallest legal value", f"{_number_text(least)}{unit}"
        )
    if most is not None and value > most:
        return _out_of_range_problem(
            f"{value} is above the largest legal value", f"{_number_text(most)}{unit}"
        )
    if above is not None and value <= above:
        return _out_of_range_problem(
            f"{value} must be above {_number_text(above)}", f"more than {_number_text(above)}"
        )
    return None


def _out_of_range_problem(message: str, nearest_legal: str) -> ValueProblem:
    return ValueProblem(message, f"nearest legal value: {nearest_legal}", out_of_range=True)


def _number_text(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _collect_leaves(config: Any, prefix: str, table: dict[str, Leaf]) -> None:
    hints = attribute_types(config.__class__)
    for item in fields(config):
        value = getattr(config, item.name)
        group = getattr(value, "units", "")
        if group:
            _collect_units(group, kind_of(value), table)
        elif is_dataclass(value):
            _collect_leaves(value, f"{prefix}{item.name}.", table)
        else:
            key = f"{prefix}{item.name}"
            table[key] = Leaf(key, hints[item.name], to_plain(value), item.metadata)


def _collect_units(group: str, default: str, table: dict[str, Leaf]) -> None:
    """Add the keys of all kinds of a group, the default kind's first and with its description.

    A key has the widest of its kinds' ranges; `compose` checks the chosen kind's own.
    """
    found = {kind: keys_of(group, kind) for kind in dict.fromkeys([default, *list_kinds(group)])}
    having: dict[str, list[str]] = {}
    for kind, keys in found.items():
        for key in keys:
            having.setdefault(key, []).append(kind)
    for key, kinds in having.items():
        leaf = found[kinds[0]][key]
        ranges = [[found[kind][key].metadata.get(name) for name in RANGE] for kind in kinds]
        if any(each != ranges[0] for each in ranges):
            lows: list[Any] = [above if least is None else least for least, _, above in ranges]
            mosts: list[Any] = [most for _, most, _ in ranges]
            widest = {
                "minimum": None if None in lows else min(lows),
                "maximum": None if None in mosts else max(mosts),
                "above": None,
            }
            leaf = replace(leaf, metadata={**leaf.metadata, **widest})
        table[key] = leaf if len(kinds) == len(found) else replace(leaf, kinds=tuple(sorted(kinds)))


def _convert(hint: Any, value: Any, text: str | None, default: Any) -> Any:
    if value == "???":
        raise ValueProblem("??? stands for a missing value", _type_in_words(hint))
    if hint is Any:
        return _convert_any(value)
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = [item for item in get_args(hint) if item is not type(None)]
        return _convert(hint, value, text, default)
    if value is None:
        shown = f"; its default is {default}" if default not in (None, [], {}) else ""
        raise ValueProblem("this key cannot be null", f"{_type_in_words(hint)}{shown}")
    if origin is list:
        return _convert_list(hint, value)
    if origin is dict:
        return _convert_mapping(hint, value)
    if is_dataclass(hint):
        return (
            _convert_part(hint, value) if hasattr(hint, "is_part") else _convert_entry(hint, value)
        )
    if issubclass(hint, Enum):
        return _convert_member(hint, value, text)
    return _SCALARS[hint](value, text)


def _convert_any(value: Any) -> Any:
    """Check a value of free-form JSON, such as DeepSpeed's configuration."""
    if isinstance(value, dict):
        return {str(name): _convert_any(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_convert_any(item) for item in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value if isinstance(value, int) else _convert_float(value, None)
    if value is None or isinstance(value, (str, bool)):
        return value
    raise ValueProblem(f"{type(value).__name__} has no form in JSON", "quote it as text")


def _convert_list(hint: Any, value: Any) -> list[Any]:
    inner = get_args(hint)[0]
    if not isinstance(value, list):
        shown = as_written(value) or "nothing"
        raise ValueProblem(f"expected a list, got {shown}", _in_a_list(inner, value))
    return [_convert(inner, item, None, None) for item in value]


def _in_a_list(inner: Any, value: Any) -> str:
    """Return the hint for a single value where a list of such values is expected."""
    if value == "":
        return "write [] for none"
    try:
        _convert(inner, value, None, None)
    except ValueProblem:
        return ""
    return f"write it as [{as_written(value)}]"


def _convert_mapping(hint: Any, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueProblem(f"expected a mapping, got {as_written(value) or 'nothing'}")
    inner = get_args(hint)[1]
    return {str(name): _convert(inner, item, None, None) for name, item in value.items()}


def _convert_part(part: Any, value: Any) -> dict[str, Any]:
    """Check the keys that are set in a named section. Each of them can also be set alone."""
    legal = part_leaves(part)
    if not isinstance(value, dict):
        shown = as_written(value) or "nothing"
        raise ValueProblem(f"expected a section, got {shown}", f"its keys: {', '.join(legal)}")
    for name in value:
        if name not in legal:
            close = ", ".join(nearest_names(str(name), legal)) or ", ".join(legal)
            raise ValueProblem(f"such a section has no key {name}", f"did you mean {close}?")
    return {name: convert_value(legal[name], item) for name, item in value.items()}


def _convert_entry(hint: Any, value: Any) -> dict[str, Any]:
    """Check an entry of a list of mappings, and fill keys that are not set with their defaults."""
    hints = attribute_types(hint)
    if not isinstance(value, dict):
        raise ValueProblem(f"expected a mapping, got {value!r}", f"its keys: {', '.join(hints)}")
    for name in value:
        if name not in hints:
            close = nearest_names(str(name), hints)
            legal = f"its keys: {', '.join(hints)}"
            hint_text = f"did you mean {close[0]}? {legal}" if close else legal
            raise ValueProblem(f"an entry has no key {name}", hint_text)
    entry = {item.name: to_plain(item.default) for item in fields(hint)}
    units = {item.name: item.metadata.get("unit") or "" for item in fields(hint)}
    for name, item in value.items():
        number = without_suffix(item, units[name], is_count=_is_count(hints[name]))
        entry[name] = _convert(hints[name], number, None, None)
    return entry


def _convert_member(kind: type[Enum], value: Any, text: str | None) -> Any:
    members = {str(member.value): member.value for member in kind}
    return members[_require_name(tuple(members), value, text)]


def _require_name(members: tuple[str, ...], value: Any, text: str | None) -> str:
    written = value if isinstance(value, str) else text if text is not None else str(value)
    if written in members:
        return written
    close = nearest_names(written, members)
    legal = f"one of {', '.join(members)}"
    raise ValueProblem(
        f"{written!r} is not a legal value",
        f"did you mean {close[0]}? It is {legal}" if close else f"it is {legal}",
    )


def _require_names(leaf: Leaf, value: Any, text: str | None) -> Any:
    """Check the name of one option of a group, or a list of distinct names."""
    if get_origin(leaf.hint) is not list:
        return _require_name(leaf.choices, value, text)
    written = _convert(leaf.hint, value, text, leaf.default)
    for name in written:
        hint = variant_hint(leaf.metadata["units"], name)
        if hint and name not in leaf.choices:
            raise ValueProblem(f"{name!r} is not a legal value", hint)
    accepted = [_require_name(leaf.choices, name, None) for name in written]
    once = list(dict.fromkeys(accepted))
    if len(once) < len(accepted):
        twice = next(name for name in once if accepted.count(name) > 1)
        raise ValueProblem(f"{twice} is named twice", f"{leaf.key}={as_written(once)}")
    return accepted


def _convert_each(leaf: Leaf, value: Any) -> dict[str, Any]:
    """Check a mapping of options' own sections, keyed by option name."""
    if not isinstance(value, dict):
        shown = as_written(value) or "nothing"
        raise ValueProblem(f"expected a mapping, got {shown}", _as_typed(leaf, value))
    group = leaf.metadata["each"]
    return {str(name): _convert_section(group, str(name), own) for name, own in value.items()}


def _convert_section(group: str, name: str, value: Any) -> dict[str, Any] | None:
    """Check the keys that are set in one option's section; None removes the section."""
    what = group.removesuffix("s")
    if name not in list_kinds(group):
        close, legal = (
            nearest_names(name, list_kinds(group)),
            f"there are {', '.join(list_kinds(group))}",
        )
        hint = f"did you mean {close[0]}? {legal.capitalize()}" if close else legal
        raise ValueProblem(f"there is no {what} {name}", hint)
    if value is None:
        return None
    own = option_leaves(group, name)
    if not isinstance(value, dict):
        shown = as_written(value) or "nothing"
        raise ValueProblem(f"expected a section, got {shown}", f"its keys: {', '.join(own)}")
    for key in value:
        if key not in own:
            close = nearest_names(str(key), own)
            having = [each for each in list_kinds(group) if key in option_leaves(group, each)]
            hint = f"did you mean {close[0]}? " if close else f"its keys: {', '.join(own)}. "
            hint += f"{' or '.join(having)} has it" if having else ""
            raise ValueProblem(f"the {what} {name} has no key {key}", hint.strip())
    return {key: convert_value(own[key], item) for key, item in value.items()}


def _convert_bool(value: Any, text: str | None) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in SWITCHES:
        return SWITCHES[value.lower()]
    hint = "write false" if value == 0 else "write true"
    raise ValueProblem(f"expected true or false, got {_value_in_words(value)}", hint)


def _convert_int(value: Any, text: str | None) -> int:
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        close = f"write {round(value)}" if _is_finite(value) else ""
        raise ValueProblem(f"expected a whole number, got {_value_in_words(value)}", close)
    if abs(value) > LARGEST_INTEGER:
        raise ValueProblem("the number is too large", f"at most {LARGEST_INTEGER}")
    return value


def _convert_float(value: Any, text: str | None) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueProblem(f"expected a number, got {_value_in_words(value)}")
    if not _is_finite(value):
        raise ValueProblem("expected a finite number")
    return float(value)


def _convert_str(value: Any, text: str | None) -> str:
    if isinstance(value, (list, dict)):
        raise ValueProblem(
            f"expected a single value, got {_value_in_words(value)}", "quote the text"
        )
    return value if isinstance(value, str) else text if text is not None else str(value)


_SCALARS = {bool: _convert_bool, int: _convert_int, float: _convert_float, str: _convert_str}


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and abs(value) <= LARGEST_INTEGER


def _value_in_words(value: Any) -> str:
    is_huge = isinstance(value, int) and abs(value) > LARGEST_INTEGER
    return "a very large number" if is_huge else repr(value)[:80]


def _type_in_words(hint: Any) -> str:
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(str(member.value) for member in hint)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return f"give {names.get(hint, 'a value')}"
