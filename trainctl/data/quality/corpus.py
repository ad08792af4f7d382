"""The columns of all parts as one table, whose rows have ids: 0 and up, by precedence.

Sources stand in the order of their precedence, parts of a source in their own, documents in that of
the part. Of two that are alike the one with the lower id stays, so nothing depends on
the order in which parts were measured, or are given.
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
    """A part's columns in the table."""

    source: str
    name: str
    columns: Columns
    """What was measured of it."""
    first: int
    """The id of its first document."""

    @property
    def ids(self) -> I64:
        """Of its documents, [documents]."""
        return np.arange(self.first, self.first + self.columns.documents)

    def among(self, ids: I64) -> Bool:
        """Which of its documents are among ids, which ascend: [documents]."""
        found = np.zeros(self.columns.documents, dtype=np.bool_)
        begin, end = np.searchsorted(ids, (self.first, self.first + len(found)))
        found[ids[begin:end] - self.first] = True
        return found


@dataclass(frozen=True)
class Measured:
    """All parts."""

    parts: Sequence[MeasuredPart]
    """All of them, by precedence."""

    @classmethod
    def load(
        cls, parts: Sequence[PartToMeasure], folder: Path, precedence: Sequence[str] = ()
    ) -> Measured:
        """Return the columns of parts.

        Args:
            parts: In any order; all measured.
            precedence: Sources, those first whose documents stay; others follow by name.

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
        """The first id of each part, and what would be the next one's: [parts + 1]."""
        return np.array([*(part.first for part in self.parts), self.documents], dtype=np.int64)

    @property
    def documents(self) -> int:
        """Rows."""
        last = self.parts[-1] if self.parts else None
        return last.first + last.columns.documents if last is not None else 0

    def where(self, document: int) -> tuple[MeasuredPart, int]:
        """Return a document's part, and its number there, as the part's reader gave it."""
        part = self.parts[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        return part, int(part.columns["number"][document - part.first])

    def rows(self, name: str, ids: I64) -> Array:
        """Return a column at some ids, in their order."""
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
        """Return a column of several values a row at some ids: values one after the other, and
        counts."""
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
        """Yield each part that has some of the ids, their places among them, and their rows in
        it."""
        if not len(ids):
            return
        owner = np.searchsorted(self.firsts, ids, side="right") - 1
        order = np.argsort(owner, kind="stable")
        found, begin = np.unique(owner[order], return_index=True)
        for number, places in zip(found.tolist(), np.split(order, begin[1:]), strict=True):
            part = self.parts[number]
            yield part, places, ids[places] - part.first
