"""Conversion of a configuration by its program's table."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from trainctl.config.keys import as_override
from trainctl.config.registry import load_spec
from trainctl.errors import Finding, TrainctlError
from trainctl.migration.configs.result import ConvertedKeys, ImportResult, Why
from trainctl.migration.configs.tables import KeyTable, TableEntry
from trainctl.models.local_path import is_there, local_path
from trainctl.options.data import SampleKind

FREE = ("callbacks.", "deepspeed.", "logging.", "model.")
"""Keys of sections that the composition without the model and the loggers does not have."""


LENGTH = "training.sequence_length"
HELD_OUT, NO_HELD_OUT = "data.held_out_paths", "TC571"
EVERY = "training.evaluate_every_steps"
AXES = ("tensor", "pipeline", "sequence", "context", "expert")
SIZES = tuple(f"parallelism.{axis}" for axis in AXES)


@dataclass
class Conversion:
    """A source document and what it has been converted to so far; conversions read and fill it."""

    table: KeyTable
    document: Mapping[str, Any]
    """The document as it was read."""
    folder: Path
    """Folder of the file; paths in it may be relative to it."""
    world_size: int | None
    """Number of ranks, if the user gave it."""
    converted: ConvertedKeys = field(default_factory=ConvertedKeys)
    findings: list[Finding] = field(default_factory=list)
    leaves: dict[str, Any] = field(default_factory=dict)
    """Value of each key of the document, dotted."""
    _names: dict[str, str] = field(default_factory=dict)
    """Key as the document writes it, by the table's name."""

    def __post_init__(self) -> None:
        self.leaves = dict(flatten(self.document, self.table))
        for key in sorted(self.leaves, key=lambda each: self.leaves[each] is None):
            self._names.setdefault(self.table.canonical(key), key)

    def get(self, name: str) -> Any:
        """Return the value of a key of the table, by any of its aliases, else its default."""
        value = self.leaves.get(self.name_of(name))
        entry = self.table.keys.get(name)
        return value if value is not None or entry is None else entry.default

    def is_on(self, name: str) -> bool:
        """Return True if the value of a key, or its default, is true."""
        return self.get(name) is True

    def number(self, name: str) -> float | None:
        """Return the value of a key if it is a number, else its default; None without one."""
        value = self.get(name)
        if is_number(value):
            return cast(float, value)
        entry = self.table.keys.get(name)
        if entry is not None and entry.convert and self.given(name):
            self.leave(name, "it is no number")
        return entry.default if entry is not None and is_number(entry.default) else None

    def count(self, name: str) -> int:
        """Return the value of a key as a whole number above 0, else its default; 0 without one."""
        number = self.number(name)
        entry = self.table.keys.get(name)
        default = entry.default if entry is not None and is_number(entry.default) else 0
        return int(number if number is not None and number >= 1 else max(0, default))

    def texts(self, name: str) -> list[str]:
        """Return the value of a key as a list of texts; a single value is a list of one."""
        value = self.get(name)
        values = value if isinstance(value, list) else [] if value is None else [value]
        return [str(each) for each in values]

    def given(self, name: str) -> bool:
        """Return True if the document sets the key, and not to null."""
        return self.leaves.get(self.name_of(name)) is not None

    def keys_of(self, function: str, but: Container[str] = ()) -> list[str]:
        """Return the document's keys, besides nulls, that a function of `conversions/` reads.

        They are in the order of the table.

        Args:
            but: Names of the table that are left out.
        """
        names = list(self.table.keys)
        found = [
            key
            for key, value in self.leaves.items()
            if value is not None
            and self.is_read(key)
            and self.table.canonical(key) not in but
            and (entry := self.table.entry(key)) is not None
            and entry.convert == function
        ]
        return sorted(
            found, key=lambda key: names.index(self.table.find(self.table.canonical(key)))
        )

    def unused_keys_of(self, function: str, but: Container[str] = ()) -> list[str]:
        """Return those of `keys_of` that nothing has been set by and that are not left out."""
        origins = self.converted.origins.values()
        used = {name for names in origins for name in names}
        used |= {each.key for each in self.converted.left_out}
        return [key for key in self.keys_of(function, but) if key not in used]

    def name_of(self, name: str) -> str:
        """Return how the document writes a key of the table."""
        return self._names.get(name, name)

    def is_read(self, key: str) -> bool:
        """Return False if another alias of the document's key is read in its place."""
        return "[" in key or self.name_of(self.table.canonical(key)) == key

    def locate(self, path: str) -> Path:
        """Return where a path of the document leads: from the current folder, where programs are
        started, or from the file's own.
        """
        here = local_path(path)
        return here if is_there(here) else self.folder / here

    def set(self, ours: str, value: Any, *names: str) -> None:
        """Set trainctl's key, or the option of its group.

        Args:
            names: Keys of the source that ask for it; those that the document lacks do not count.
        """
        self.converted.set(ours, value)
        given = tuple(self.name_of(name) for name in names if self.given(name))
        if given:
            self.converted.origins[ours] = given

    def copy(self, ours: str, name: str) -> None:
        """Set trainctl's key to the value of a key of the source, if the document gives that."""
        if self.given(name):
            self.set(ours, self.get(name), name)

    def leave(
        self, name: str, reason: str = "", nearest: str = "", why: Why = Why.left, value: Any = None
    ) -> None:
        """Record a key of the source that is not carried over.

        If the document does not have the key, what its default means is recorded. Without a reason,
        reason and nearest are the table's `left` and `nearest` of the key.
        """
        key = self.name_of(name)
        value = self.get(name) if value is None else value
        if not reason and (entry := self.table.entry(key)) is not None:
            reason, nearest = entry.left.format(value=value), entry.nearest
        before = [each for each in self.converted.left_out if each.key == key]
        if before and before[0].value is not None:
            return
        for each in before:  # it was left out as empty, and here is what that means
            self.converted.left_out.remove(each)
        if key not in self.leaves:
            why = Why.default if why is Why.left else why
        self.converted.leave(key, value, reason, nearest, why)

    def ignore(self, reason: str, *names: str) -> None:
        """Record those of the keys that the document gives as without effect here."""
        for name in filter(self.given, names):
            self.leave(name, reason, why=Why.ignored)


def is_number(value: Any) -> bool:
    """Return True if a value is a number, and not a switch."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def converter(name: str) -> Callable[[Conversion], None]:
    """Return the function `MODULE.FUNCTION` of `conversions/`, which a table names."""
    module, _, function = name.partition(".")
    loaded = import_module(f"trainctl.migration.configs.conversions.{module}")
    found: Callable[[Conversion], None] = getattr(loaded, function)
    return found


def flatten(
    document: Mapping[str, Any], table: KeyTable | None = None, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf; a mapping that the table has is a leaf."""
    for name, value in document.items():
        key = f"{prefix}{name}"
        is_leaf = table is not None and table.is_leaf(key)
        if isinstance(value, Mapping) and value and not is_leaf:
            yield from flatten(value, table, f"{key}.")
        elif _is_list_of_mappings(value) and not is_leaf:
            for index, item in enumerate(value):
                yield from flatten(item, table, f"{key}[{index}].")
        else:
            yield key, value


def _is_list_of_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, Mapping) for x in value)


def import_document(
    table: KeyTable, document: Mapping[str, Any], *, folder: Path, world_size: int | None = None
) -> ImportResult:
    """Convert a document by its program's table; `findings` has no check of the result yet."""
    conversion = Conversion(table, document, folder, world_size)
    for ours, value in table.always.items():
        conversion.set(ours, value)
    for name, entry in table.keys.items():
        if entry.key and entry.default is not None and not conversion.given(name):
            _take(conversion, "", entry, entry.default)
    to_convert: set[str] = set()
    for key, value in conversion.leaves.items():
        found = table.entry(key)
        if value is not None and not conversion.is_read(key):
            other = conversion.name_of(table.canonical(key))
            conversion.converted.leave(key, value, f"{other} says it", why=Why.ignored)
        elif found is not None and found.convert and value is not None:
            to_convert.add(key)
        else:
            _apply(conversion, key, value, found)
    for function in dict.fromkeys(entry.convert for entry in table.keys.values() if entry.convert):
        _convert(conversion, function)
    _make_room_for_answers(conversion)
    _settle_held_out(conversion)
    left = {each.key for each in conversion.converted.left_out}
    conversion.converted.imported = (conversion.converted.imported | to_convert) - left
    return _result(conversion)


def _convert(conversion: Conversion, function: str) -> None:
    """Call a function of `conversions/`.

    Raises:
        TrainctlError: Values that it reads have another form than the program's.
    """
    try:
        converter(function)(conversion)
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, OSError) as error:
        keys = ", ".join(conversion.keys_of(function)) or conversion.table.name
        raise TrainctlError(
            f"{keys[:200]}: the values have another form than {conversion.table.name}'s "
            f"({type(error).__name__}: {str(error)[:100]})",
            hint="remove what is wrong there, or check it in the program itself",
        ) from None


def _make_room_for_answers(conversion: Conversion) -> None:
    """Double the length of samples with two answers: other programs have one row for each."""
    converted = conversion.converted
    length, kind = converted.settings.get(LENGTH), converted.choices.get("objective")
    if kind is None or length is None or not is_number(length):
        return
    if load_spec("objective", kind).takes not in (SampleKind.pairs, SampleKind.answers):
        return
    converted.settings[LENGTH] = 2 * length
    conversion.leave(
        _key_for(conversion, LENGTH),
        f"it is of a prompt with one answer, and a sample has two of both: {2 * length} here",
        f"{LENGTH}={2 * length}",
        value=length,
    )


def _key_for(conversion: Conversion, ours: str) -> str:
    """Return the table's first key that the document gives for trainctl's key, else its first."""
    names = [
        name for name, entry in conversion.table.keys.items() if ours in (entry.key, *entry.to)
    ]
    return next(filter(conversion.given, names), names[0] if names else ours)


def _settle_held_out(conversion: Conversion) -> None:
    """Hold out what the source evaluates on: nothing that it trains on, nothing by default."""
    settings, table = conversion.converted.settings, conversion.table
    meant = {ours for entry in table.keys.values() for ours in (entry.key, *entry.to)}
    if meant.isdisjoint((HELD_OUT, EVERY)):
        return  # evaluations are the script's
    named = settings.get(HELD_OUT, [])
    trained = [path for path in named if path in settings.get("data.paths", [])]
    if trained:
        settings[HELD_OUT] = [path for path in named if path not in trained]
        conversion.leave(
            _key_for(conversion, HELD_OUT),
            "files are read whole, and these are trained on",
            f"{HELD_OUT}=[FILE]",
            value=trained,
        )
    if not settings.get(HELD_OUT):
        settings.pop(HELD_OUT, None)
        is_evaluated = settings.get(EVERY) is not None
        share = settings.setdefault("data.held_out_fraction", 0.0)
        if is_evaluated and share == 0:
            conversion.findings.append(
                Finding(
                    rule=NO_HELD_OUT,
                    key=HELD_OUT,
                    message="the source evaluates, on data that is not known here",
                    hint=f"{HELD_OUT}=[FILE], data.held_out_fraction=0.05, or "
                    "training.evaluation_samples=0",
                )
            )


def _apply(conversion: Conversion, key: str, value: Any, entry: TableEntry | None) -> None:
    """Carry one key of the document over, or record why not."""
    leave = conversion.converted.leave
    if entry is None and value in (None, {}, []) and conversion.table.has_parts(key):
        leave(key, value, "empty: its keys have their defaults", why=Why.ignored)
    elif entry is None:
        near = conversion.table.nearest(key)
        reason = f"{conversion.table.name} has no such key that is known here"
        leave(key, value, reason, f"did you mean {near}?" if near else "", Why.unknown)
    elif value is None:
        leave(key, value, f"empty: {conversion.table.name}'s default holds", why=Why.ignored)
    elif entry.ignored:
        leave(key, value, entry.ignored, entry.nearest, Why.ignored)
    elif entry.left and not entry.key:
        is_off = any(is_same(each, value) for each in entry.same)
        leave(key, value, entry.left, entry.nearest, Why.ignored if is_off else Why.left)
    else:
        _take(conversion, key, entry, value)


def is_same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; a switch equals no number."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _take(conversion: Conversion, key: str, entry: TableEntry, value: Any) -> None:
    """Set trainctl's key of an entry; `key` is empty for a default."""
    converted = conversion.converted
    if entry.values:
        found = [ours for theirs, ours in entry.values.items() if is_same(theirs, value)]
        if not found:
            known = ", ".join(as_override(each) for each in entry.values)
            reason = entry.left.format(value=value) or f"{entry.key} has nothing for it"
            converted.leave(key, value, reason, entry.nearest or known)
            return
        value = found[0]
    if entry.key in SIZES and is_number(value):
        value = max(1, value)  # 0 and -1 switch an axis off
    if isinstance(value, Mapping) and "left" in value:
        converted.leave(key, conversion.leaves.get(key), value["left"], value.get("nearest", ""))
    elif key:
        converted.take(key, entry.key, value)
    else:
        converted.set(entry.key, value)


def _result(conversion: Conversion) -> ImportResult:
    """Return the result, without settings that the chosen options do not have."""
    converted = conversion.converted
    if not converted.settings.get("optimizer.weight_decay"):
        converted.settings.pop("optimizer.decay_embeddings", None)  # it would have no effect
    choices = (f"{group}={option}" for group, option in converted.choices.items())
    known = _keys_with(tuple(each for each in choices if not each.startswith("model=")))
    settings = {}
    for ours in sorted(converted.settings, key=lambda key: _place(key, known)):
        value = converted.settings[ours]
        if ours in known or ours.startswith(FREE):
            settings[ours] = value
        elif ours in converted.origins:
            group = ours.partition(".")[0]
            reason = f"{group}={converted.choices.get(group)} has no {ours}"
            for key in converted.imported & {*converted.origins[ours]}:
                converted.leave(key, conversion.leaves[key], reason)
                converted.imported.discard(key)
    return ImportResult(
        choices=converted.choices,
        settings=settings,
        passed={},
        left_out=tuple(converted.left_out),
        carried=tuple(key for key in conversion.leaves if key in converted.imported),
        origins=converted.origins,
        tool=conversion.table.tool,
        findings=tuple(conversion.findings),
    )


@cache
def _keys_with(choices: tuple[str, ...]) -> list[str]:
    from trainctl.config.compose import compose_leniently
    from trainctl.config.schema import walk_leaves

    return [key for key, _, _ in walk_leaves(compose_leniently(choices).config)]


def _place(key: str, known: list[str]) -> int:
    """Return the position of a key in the schema; after all others if it has none."""
    return known.index(key) if key in known else len(known)
