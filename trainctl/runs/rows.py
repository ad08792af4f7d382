"""A `step` record as a row of numbers whose names are written once.

A million steps repeat the same forty names a million times. So a step's line holds the numbers of
the usual fields as a list, and the byte of the file at which a `columns` record has their names. To
read a line, a reader needs only that one record, wherever it begins; torn or lost lines elsewhere
do no harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = "columns"
"""Kind of the record that names the numbers of rows; readers do not return it."""

PACKED = (
    "learning_rate",
    "learning_rates",
    "grad_norm",
    "grad_norms",
    "clip_at",
    "z_loss",
    "experts",
    "loss_scale",
    "tokens",
    "tokens_per_second",
    "mfu",
    "seconds",
    "peak_bytes",
    "samples",
    "sources",
)
"""Fields of a step that go into its row, if they are there; all other fields keep their names."""

_RATES = ("learning_rate", "learning_rates")

Place = tuple[str | int, ...]
"""Path of a number in a record: names, and indices of lists."""

Names = tuple[tuple[Place, ...], ...]
"""Paths of each column's number; one number may be at several paths."""


def pack(fields: Mapping[str, Any]) -> tuple[Names, list[Any]]:
    """Return the columns of a record's fields, and its row.

    Equal learning rates share one column: parameter groups mostly have the same rate.
    """
    names: list[list[Place]] = []
    row: list[Any] = []
    rates: dict[float, int] = {}
    for field in PACKED:
        for place, value in _leaves(fields[field], (field,)) if field in fields else ():
            if field in _RATES and isinstance(value, float):
                if value in rates:
                    names[rates[value]].append(place)
                    continue
                rates[value] = len(row)
            names.append([place])
            row.append(value)
    return tuple(map(tuple, names)), row


class Layout:
    """Restores the named fields of rows; made once for the many rows with the same columns.

    Args:
        names: Names of the columns.

    Raises:
        ValueError: No record has such fields.
    """

    def __init__(self, names: Names) -> None:
        self._width = len(names)
        places = [(place, index) for index, column in enumerate(names) for place in column]
        fields: dict[str | int, list[tuple[Place, int]]] = {}
        for place, index in places:
            fields.setdefault(place[0], []).append((place, index))
        self._single: list[tuple[str, int]] = []
        self._maps: list[tuple[str, list[str | int], list[int]]] = []
        self._others: list[tuple[Place, int]] = []
        for field, own in fields.items():
            if [len(place) for place, _ in own] == [1]:
                self._single.append((str(field), own[0][1]))
            elif all(len(place) == 2 and isinstance(place[1], str) for place, _ in own):
                keys = [place[1] for place, _ in own]
                self._maps.append((str(field), keys, [index for _, index in own]))
            else:
                self._others += own
        # One column may fill several indices of a list, and lists must be filled in order.
        self._others.sort(key=lambda other: [p if isinstance(p, int) else -1 for p in other[0]])

    def fields(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the fields that were packed into a row.

        Raises:
            ValueError: The row is of other columns.
        """
        if len(row) != self._width:
            raise ValueError("a row of other columns")
        found: dict[str, Any] = {name: row[index] for name, index in self._single}
        for name, keys, columns in self._maps:
            found[name] = {key: row[i] for key, i in zip(keys, columns, strict=True)}
        for place, index in self._others:
            _put(found, place, row[index])
        return found


def names_of(plain: Any) -> Names:
    """Return the columns of a `columns` record, from plain JSON.

    Raises:
        ValueError: They are malformed.
    """
    try:
        names = tuple(tuple(map(tuple, column)) for column in plain)
    except TypeError:
        raise ValueError("no columns") from None
    places = [place for column in names for place in column]
    parts = [part for place in places for part in place]
    if all(names) and all(places) and all(isinstance(part, str | int) for part in parts):
        return names
    raise ValueError("no columns")


def _leaves(value: Any, place: Place) -> Iterator[tuple[Place, Any]]:
    """Yield path and value of each leaf, in order; an empty list or mapping is a leaf."""
    if value and isinstance(value, dict):
        for name, item in value.items():
            yield from _leaves(item, (*place, name))
    elif value and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, (*place, index))
    else:
        yield place, value


def _put(found: Any, place: Place, value: Any) -> None:
    """Put a value at its path; lists must be filled in order."""
    for part, following in zip(place, (*place[1:], None), strict=True):
        inner: Any = [] if isinstance(following, int) else {}
        last = following is None
        if isinstance(part, int):
            if not isinstance(found, list) or part > len(found):
                raise ValueError("a list with gaps")
            if part == len(found):
                found.append(value if last else inner)
            found = found[part]
        else:
            found = found.setdefault(part, value if last else inner)
