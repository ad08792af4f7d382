"""Columns of numbers from a run's records, which grow record by record: eight bytes per number."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

NAN = float("nan")


class GrowingColumns:
    """One array per field, all of the same length; NaN where a record lacks the field."""

    def __init__(self) -> None:
        self._arrays: dict[str, array[float]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __getitem__(self, name: str) -> Numbers:
        """Return a copy of a field's numbers, shape (length,); all NaN for an unknown field."""
        found = self._arrays.get(name)
        return np.full(self._length, NAN) if found is None else np.array(found, dtype=np.float64)

    @property
    def names(self) -> list[str]:
        """Names of the fields, in the order in which they were first seen."""
        return list(self._arrays)

    def append(self, values: Mapping[str, float]) -> None:
        """Add a record."""
        arrays = self._arrays
        for name, value in values.items():
            found = arrays.get(name)
            if found is None:
                found = arrays[name] = array("d", [NAN]) * self._length
            found.append(value)
        self._length += 1
        if len(values) != len(arrays):
            for found in arrays.values():
                if len(found) < self._length:
                    found.append(NAN)

    def first_not_below(self, name: str, value: float) -> int:
        """Return the first record whose field is at least `value`; the field must ascend."""
        return bisect_left(self._arrays[name], value) if self._length else 0

    def last(self, name: str) -> float:
        """Return the field of the last record; NaN if there is no record, or it lacks the field."""
        found = self._arrays.get(name)
        return found[-1] if found else NAN

    def cut(self, index: int, keep: Collection[str] | None = None) -> GrowingColumns:
        """Remove the records from `index` on, and return them with only the fields in `keep`."""
        tail = GrowingColumns()
        tail._length = self._length - index
        for name, found in self._arrays.items():
            if keep is None or name in keep:
                tail._arrays[name] = found[index:]
            del found[index:]
        self._length = index
        return tail
