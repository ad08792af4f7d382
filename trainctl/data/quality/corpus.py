"""The columns of all parts as one table. Row ids count from 0 in the order of precedence.

Sources are ordered by precedence, parts of a source by their own order, documents as in the part.
Of two duplicates the document with the lower id stays. So the result does not depend on the order
in which parts are measured or given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.columns import Columns
from trainctl.data.quality.hashing import I64, Bool
from trainctl.data.quality.measure import PartToMeasure, measured

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MeasuredPart:
    """A part of the table."""

    source: str
    name: str
    columns: Columns
    """Measured columns of the part."""
    first: int
    """Id of the part's first document."""

    @property
    def ids(self) -> I64:
        """Ids of the part's documents, [documents]."""
        return np.arange(self.first, self.first + self.columns.documents)

    def among(self, ids: I64) -> Bool:
        """Return the mask of the part's documents in `ids` (ascending), [documents]."""
        found = np.zeros(self.columns.documents, dtype=np.bool_)
        begin, end = np.searchsorted(ids, (self.first, self.first + len(found)))
        found[ids[begin:end] - self.first] = True
        return found


@dataclass(frozen=True)
class Measured:
    """The table of all parts."""

    parts: Sequence[MeasuredPart]
    """Parts in the order of their ids."""

    @classmethod
    def load(
        cls, parts: Sequence[PartToMeasure], folder: Path, precedence: Sequence[str] = ()
    ) -> Measured:
        """Load the columns of measured parts.

        `parts` may be in any order. `precedence` lists sources, the first with the highest
        precedence; sources that are not listed follow by name.

        Raises:
            TrainctlError: A part is not measured, or damaged (exit code 5).
        """

        def place(part: PartToMeasure) -> tuple[int, str, int, str]:
            known = part.source in precedence
            at = precedence.index(part.source) if known else len(precedence)
            return at, part.source, part.order, part.name

        table, first = [], 0
        for part in sorted(parts, key=place):
            columns = measured(part, folder)
            table.append(MeasuredPart(part.source, part.name, columns, first))
            first += columns.documents
        return cls(table)

    @cached_property
    def firsts(self) -> I64:
        """First id of each part, and the number of all documents, [parts + 1]."""
        return np.array([*(part.first for part in self.parts), self.documents], dtype=np.int64)

    @property
    def documents(self) -> int:
        """Number of rows."""
        last = self.parts[-1] if self.parts else None
        return last.first + last.columns.documents if last is not None else 0

    def where(self, document: int) -> tuple[MeasuredPart, int]:
        """Return a document's part and its number in the part."""
        part = self.parts[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        return part, int(part.columns["number"][document - part.first])

    def rows(self, name: str, ids: I64) -> Array:
        """Return the values of a column for some ids, in the order of the ids."""
        found: list[tuple[I64, Array]] = [
            (places, np.asarray(part.columns[name][rows])) for part, places, rows in self._of(ids)
        ]
        if not found:
            return np.empty(0)
        result = np.empty((len(ids), *found[0][1].shape[1:]), found[0][1].dtype)
        for places, values in found:
            result[places] = values
        return result

    def ragged(self, name: str, ids: I64) -> tuple[Array, I64]:
        """Return the values of a ragged column for some ids, concatenated, and the count of
        each.
        """
        counts = np.zeros(len(ids), dtype=np.int64)
        pieces = []
        for part, places, rows in self._of(ids):
            values, counts[places] = part.columns.ragged(name, rows)
            pieces.append((places, values))
        if len(pieces) == 1:
            return pieces[0][1], counts
        ends = np.cumsum(counts)
        result = np.empty(int(counts.sum()), pieces[0][1].dtype if pieces else np.uint32)
        for places, values in pieces:
            own = counts[places]
            at = np.arange(own.sum()) + np.repeat(ends[places] - np.cumsum(own), own)
            result[at] = values
        return result, counts

    def _of(self, ids: I64) -> Iterator[tuple[MeasuredPart, I64, I64]]:
        """Yield each part with some of the ids, their positions in `ids`, and their rows."""
        if not len(ids):
            return
        owner = np.searchsorted(self.firsts, ids, side="right") - 1
        order = np.argsort(owner, kind="stable")
        found, begin = np.unique(owner[order], return_index=True)
        for number, places in zip(found.tolist(), np.split(order, begin[1:]), strict=True):
            part = self.parts[number]
            yield part, places, ids[places] - part.first
