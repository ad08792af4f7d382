"""Columns of numbers from a run's records, which grow record by record: eight bytes per number.

A curve is downsampled to buckets that keep its outliers: minimum, maximum and mean of each.
"""

from __future__ import annotations

import base64
import math
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

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

    def lower_bound(self, name: str, value: float) -> int:
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


Edges: TypeAlias = NDArray[np.int64]
"""Index of the first row of each bucket, ascending from 0."""

LATEST = 1 / 8
"""Share of all buckets that hold one of the newest rows each."""
AROUND_MARKS = 1 / 8
"""Share of all buckets that hold one row each around marks."""

MANTISSA_BITS = 15
"""Mantissa bits kept of a drawn number: five digits, which compress well."""

LEVEL = 7
"""Compression level of zlib."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedColumn:
    """A column in buckets; NaN where a bucket has no finite number."""

    mean: Numbers
    min: Numbers
    max: Numbers

    @property
    def is_exact(self) -> bool:
        """Whether each bucket holds a single number: mean, minimum and maximum are equal."""
        finite = np.isfinite(self.mean)
        return bool(np.array_equal(self.min[finite], self.max[finite]))


def bucket_edges(length: int, most: int, marks: Iterable[int] = ()) -> Edges:
    """Return buckets of `length` rows, about `most` at the most.

    Buckets have one size, except that the newest rows and the rows around marks have a bucket each:
    people look closest there.

    Args:
        most: Number of buckets; at least 64.
        marks: Rows of marks, the most important first.
    """
    if length <= most:
        return np.arange(length, dtype=np.int64)
    latest, around = int(most * LATEST), int(most * AROUND_MARKS)
    marked = list(dict.fromkeys(row for row in marks if 0 <= row < length))[: max(1, around // 16)]
    width = around // len(marked) // 2 if marked else 0
    starts = np.zeros(length, dtype=bool)
    starts[:: math.ceil(length / (most - latest - (around if marked else 0)))] = True
    starts[length - latest :] = True
    for row in marked:
        starts[max(0, row - width) : row + width] = True
    return np.flatnonzero(starts)


def reduce_columns(values: Numbers, at: Edges) -> ReducedColumn:
    """Return the mean, minimum and maximum of each bucket's finite numbers.

    Args:
        values: Shape (rows,).
    """
    if len(at) == len(values):
        found = np.where(np.isfinite(values), values, np.nan)
        return ReducedColumn(mean=found, min=found, max=found)
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, at, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), at)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = total / count
    low = np.minimum.reduceat(np.where(finite, values, np.inf), at)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), at)
    empty = count == 0
    low[empty] = high[empty] = np.nan
    return ReducedColumn(mean=mean, min=low, max=high)


def last_of(values: Numbers, at: Edges) -> Numbers:
    """Return the last number of each bucket, for a column that only grows."""
    ends = np.append(at[1:], len(values)) if len(at) else at
    last: Numbers = values[ends - 1]
    return last


def pack_column(values: Numbers, *, exactly: bool = False) -> dict[str, Any]:
    """Return a column as text for the page's script.

    The bytes of 32-bit floats, the first bytes of all numbers before the second ones, are deflated
    and base64-encoded.

    Args:
        values: Shape (n,).
        exactly: Keep all 24 bits of each mantissa instead of `MANTISSA_BITS`.
    """
    with np.errstate(over="ignore"):  # overflows of 32 bits are not drawn
        bits = values.astype("<f4").view("<u4")
    if not exactly:
        drop = 23 - MANTISSA_BITS
        finite = np.isfinite(values)
        rounded = (bits + np.uint32(1 << (drop - 1))) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
        bits = np.where(finite, rounded, bits).astype("<u4")
    planes = np.ascontiguousarray(bits.view(np.uint8).reshape(-1, 4).T)
    text = base64.b64encode(zlib.compress(planes.tobytes(), LEVEL)).decode()
    return {"n": len(values), "data": text}


def plain_numbers(values: Numbers) -> list[float | None]:
    """Return a column as a list; None where a number is not finite."""
    return [finite_or_none(value) for value in values]


def finite_or_none(value: float | None) -> float | None:
    """Return a number, or None if it is not finite: JSON has no NaN."""
    return float(value) if value is not None and math.isfinite(value) else None
