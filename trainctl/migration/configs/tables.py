"""Tables of other programs' configuration keys, and which program a document is for.

`tools/TOOL.yaml` has:

| key | meaning |
|---|---|
| `name` | the program's name in messages |
| `source` | project and commit whose schema was read |
| `extends` | another table whose keys this one has too; its own entries come first |
| `looks_like` | lists of keys: a document with all keys of one list is the program's |
| `unlike` | keys that the program's documents never have |
| `always` | trainctl keys and groups, with the values that hold for every document |
| `shown` | keys that docs/coming-from.md shows, in its order |
| `keys` | an entry for each key: dotted, `name[].key` in a list, `section.*`, `prefix_*` |

An entry is a trainctl key or group, whose value is carried as it is, or a mapping of:

| key | meaning |
|---|---|
| `key` | trainctl key or group |
| `values` | trainctl's value for each of theirs; `{left: …, nearest: …}` leaves one out |
| `convert` | function of `conversions/`, which reads this key, perhaps with others |
| `to` | with `convert`: trainctl keys and groups that the key says something about |
| `left` | why the key, or beside `values` and `convert` some `{value}`, is not carried over |
| `same` | with `left`: values that mean what trainctl does; by default false, 0 and empty |
| `nearest` | the nearest that trainctl has: an override, or a sentence |
| `ignored` | why the key has no effect here |
| `default` | the program's value if the key is absent, where trainctl's differs |
| `same_as` | another key of the table, of which this one is an alias |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainctl.config.suggest import nearest_names
from trainctl.errors import TrainctlError

TOOLS = Path(__file__).parent / "tools"
DEEPSPEED = "deepspeed"
NOTHING: tuple[Any, ...] = (False, 0, "", [], {}, "no", "none")
"""Values that switch a technique off, which trainctl does not have either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """Entry of a table: the meaning of one key of the source for trainctl."""

    key: str = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    convert: str = ""
    to: Sequence[str] = ()
    left: str = ""
    same: Sequence[Any] = NOTHING
    nearest: str = ""
    ignored: str = ""
    default: Any = None
    same_as: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTable:
    """KeyTable of one program's keys."""

    tool: str
    name: str
    source: str
    looks_like: Sequence[Sequence[str]]
    unlike: Sequence[str]
    always: Mapping[str, Any]
    shown: Sequence[str]
    keys: Mapping[str, TableEntry]

    def find(self, key: str) -> str:
        """Return the table's name of a key, with its index in a list dropped; empty if unknown.

        Dashes in a name mean underscores, where the table has these.
        """
        name = without_indices(key)
        name = name if name in self.keys else name.replace("-", "_")
        if name in self.keys:
            return name
        ends = (end for end in range(len(name), 0, -1) if name[end - 1] in "._")
        return next((part for end in ends if (part := f"{name[:end]}*") in self.keys), "")

    def canonical(self, key: str) -> str:
        """Return the table's name of a document's key, of which it may be an alias; for a key below
        `section.*` or of no entry, the key itself.
        """
        name = self.find(key)
        entry = self.keys.get(name, TableEntry())
        return entry.same_as or (key if not name or name.endswith("*") else name)

    def entry(self, key: str) -> TableEntry | None:
        """Return the entry of a document's key; None if it has none."""
        entry = self.keys.get(self.find(key))
        return self.keys[entry.same_as] if entry is not None and entry.same_as else entry

    def is_leaf(self, key: str) -> bool:
        """Return True if the table has the key, and none inside it."""
        return self.find(key) in (key, key.replace("-", "_")) and not self.has_parts(key)

    def has_parts(self, key: str) -> bool:
        """Return True if the table has keys inside this one."""
        return any(name.startswith((f"{key}.", f"{key}[].")) for name in self.keys)

    def nearest(self, key: str) -> str:
        """Return the table's name that looks most like an unknown key; empty if none does."""
        close = nearest_names(without_indices(key), list(self.keys))
        return close[0] if close else ""

    def matches(self, keys: set[str]) -> bool:
        """Return True if a document with these top-level and dotted keys is the program's."""
        keys = {*keys, *(key.replace("-", "_") for key in keys)}
        return not keys & {*self.unlike} and any(keys >= {*each} for each in self.looks_like)


def without_indices(key: str) -> str:
    """Return a key with `[]` in place of each index, as tables write it."""
    parts = key.split("[")
    return "[]".join([parts[0], *(part.partition("]")[2] for part in parts[1:])])


@cache
def tool_names() -> tuple[str, ...]:
    """Return the programs whose configuration has a table, by name."""
    return tuple(sorted(path.stem for path in TOOLS.glob("*.yaml")))


@cache
def load_table(tool: str) -> KeyTable:
    """Return the table of a program.

    Raises:
        TrainctlError: There is no such program.
    """
    if tool not in tool_names():
        known = (DEEPSPEED, *tool_names())
        close = nearest_names(tool, known)
        raise TrainctlError(
            f"there is no import from {tool}",
            hint=f"did you mean {close[0]}?" if close else f"one of {', '.join(known)}",
        )
    raw = yaml.safe_load((TOOLS / f"{tool}.yaml").read_text(encoding="utf-8"))
    base = load_table(raw["extends"]) if "extends" in raw else None
    keys = {str(key): parse_entry(value) for key, value in raw["keys"].items()}
    return KeyTable(
        tool=tool,
        name=raw["name"],
        source=raw["source"],
        looks_like=raw["looks_like"],
        unlike=raw.get("unlike", []),
        always={**(base.always if base else {}), **raw.get("always", {})},
        shown=raw.get("shown", []),
        keys={**keys, **{k: v for k, v in base.keys.items() if k not in keys}} if base else keys,
    )


def parse_entry(value: Any) -> TableEntry:
    """Return an entry as a table writes it."""
    value = {"key": value} if isinstance(value, str) else dict(value)
    to = value.pop("to", ())
    return TableEntry(**value, to=(to,) if isinstance(to, str) else tuple(to))


def detect(document: Mapping[str, Any], keys: set[str], *, file: str) -> str:
    """Return the program that a document configures, by its keys.

    Args:
        keys: Its top-level and dotted keys.

    Raises:
        TrainctlError: The keys are those of no program, or of several.
    """
    matching = [tool for tool in tool_names() if load_table(tool).matches(keys)]
    if len(matching) == 1:
        return matching[0]
    known = (DEEPSPEED, *tool_names())
    telling = (f"{tool}: {' and '.join(load_table(tool).looks_like[0])}" for tool in tool_names())
    shown = ", ".join(list(document)[:8]) or "no keys"
    if matching:
        raise TrainctlError(
            f"{file} may be of {' or '.join(matching)}: it has {shown}",
            hint=f"--from {matching[0]}",
        )
    raise TrainctlError(
        f"{file} is the configuration of no program that is known: it has {shown}",
        hint=f"--from TOOL, one of {', '.join(known)}; each is recognised by its own keys, such "
        f"as {'; '.join(telling)}",
    )
