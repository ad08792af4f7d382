"""Measured columns: an array for each measure of a part's documents, and all parts as one table.

A part's folder has `NAME.bin` for each column (flat, little-endian, rows in the order of the
documents) and `manifest.json`, which describes them and is written last. A part without a manifest
is not done and is measured again, so no other bookkeeping is needed, and any process may measure
any part. A column with a variable number of values per row is stored as two: `NAME`, and
`NAME.ends` with the end of each row's values.

Row ids of the table count from 0 in the order of precedence: sources by precedence, parts of a
source by their own order, documents as in the part. Of two duplicates the document with the lower
id stays. So the result does not depend on the order in which parts are measured or given.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import I64, Bool, Entry
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.files import sync_directory, write_json

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
FORMAT = 1


class ColumnWriter:
    """Context manager that writes a part's columns, some rows at a time.

    Files are written to a temporary folder, which replaces `folder` when it is complete. `key`
    identifies what was measured, and of which documents; readers compare it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._temporary = folder.with_name(f".{folder.name}.tmp")
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._columns: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> ColumnWriter:
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        return self

    def append(self, columns: Mapping[str, Array]) -> None:
        """Append rows to columns. The dtype and width of a column must not change."""
        for name, values in columns.items():
            form = {"dtype": values.dtype.newbyteorder("<").str, "shape": list(values.shape[1:])}
            if name not in self._open:
                path = self._temporary / f"{name}.bin"
                self._open[name] = self._files.enter_context(path.open("wb"))
                self._columns[name] = {**form, "rows": 0}
            assert form.items() <= self._columns[name].items(), name
            little_endian = values.dtype.newbyteorder("<")
            self._open[name].write(np.ascontiguousarray(values, dtype=little_endian).data)
            self._columns[name]["rows"] += len(values)

    def append_ragged(self, name: str, values: Array, counts: npt.NDArray[np.int64]) -> None:
        """Append rows with a variable number of values to a column.

        `values` are the values of all rows, concatenated; `counts` is their number in each row,
        [rows].
        """
        before = self._columns[name]["rows"] if name in self._columns else 0
        self.append({name: values, f"{name}.ends": before + np.cumsum(counts, dtype=np.int64)})

    def finish(self, **facts: Any) -> None:
        """Write the manifest with facts of the part (plain JSON), and publish the folder."""
        for stream in self._open.values():
            stream.flush()
            os.fsync(stream.fileno())
        self._files.close()
        write_json(
            self._temporary / MANIFEST,
            {"format": FORMAT, "key": self._key, "columns": self._columns, **facts},
        )
        shutil.rmtree(self._folder, ignore_errors=True)
        self._temporary.rename(self._folder)
        sync_directory(self._folder.parent)

    def __exit__(self, *_: object) -> None:
        self._files.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


@dataclass(frozen=True)
class Columns:
    """Columns of a part, memory-mapped on first use."""

    folder: Path
    manifest: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Columns:
        """Open the columns of a finished part.

        Raises:
            TrainctlError: The part is not done, or its files do not fit its manifest (exit code 5).
        """
        try:
            manifest = json.loads((folder / MANIFEST).read_bytes())
            columns = cls(folder, manifest)
            short = [name for name in manifest["columns"] if not columns._is_whole(name)]
            problem = f"of other sizes: {', '.join(short)}" if short else ""
        except OSError as error:
            problem = error.strerror or str(error)
        except (ValueError, TypeError, KeyError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            raise TrainctlError(
                f"{folder} has no columns of a corpus that could be used: {problem}",
                hint="remove it, and prepare the corpus again: what is done is not done again",
                exit_code=ExitCode.run_state,
            )
        return columns

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.manifest["columns"])

    @property
    def documents(self) -> int:
        """Number of rows."""
        rows: int = self.manifest["columns"]["number"]["rows"]
        return rows

    def __getitem__(self, name: str) -> Array:
        if name not in self._mapped:
            form = self.manifest["columns"][name]
            shape = (form["rows"], *form["shape"])
            file = self.folder / f"{name}.bin"
            self._mapped[name] = (
                np.asarray(np.memmap(file, form["dtype"], "r", shape=shape))
                if 0 not in shape
                else np.empty(shape, form["dtype"])  # an empty file cannot be mapped
            )
        return self._mapped[name]

    def ragged(self, name: str, rows: npt.NDArray[np.int64]) -> tuple[Array, npt.NDArray[np.int64]]:
        """Return the values of some rows of a column, concatenated, and the count of each row."""
        values, ends = self[name], self[f"{name}.ends"]
        last = ends[rows]
        first = np.where(rows > 0, ends[rows - 1], 0)
        counts = last - first
        places = np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
        return values[places], counts

    @cached_property
    def _mapped(self) -> dict[str, Array]:
        return {}

    def _is_whole(self, name: str) -> bool:
        form = self.manifest["columns"][name]
        expected = np.dtype(form["dtype"]).itemsize * form["rows"]
        for width in form["shape"]:
            expected *= width
        size: int = (self.folder / f"{name}.bin").stat().st_size
        return size == int(expected)


def finished_key(folder: Path) -> str | None:
    """Return the key of a finished part, None if the part is not done."""
    try:
        key: str = json.loads((folder / MANIFEST).read_bytes())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key


@dataclass(frozen=True, slots=True)
class PartToMeasure:
    """Documents that one process measures in one go."""

    source: str
    name: str
    """Unique name of the part in its source, usable as a file name."""
    identity: str
    """Identity of the documents: a part with another identity is measured again."""
    read: Callable[[], Iterable[Entry]]
    """Yields the documents. It is pickled and called in another process."""
    filters: Mapping[str, Any] = field(default_factory=dict)
    """Filters to measure for: `{name: keys}`. Thresholds in the keys do not matter."""
    order: int = 0
    """Sort key among the parts of the source; ties are ordered by name."""


def columns_folder(part: PartToMeasure, folder: Path) -> Path:
    """Return the folder of a part's columns."""
    return folder / part.source / part.name


def read_measured(part: PartToMeasure, folder: Path) -> Columns:
    """Return the columns of a measured part."""
    return Columns.load(columns_folder(part, folder))


@dataclass(frozen=True)
class MeasuredPart:
    """A part of the table."""

    source: str
    name: str
    columns: Columns
    first: int

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
class MeasuredCorpus:
    """The table of all parts."""

    parts: Sequence[MeasuredPart]

    @classmethod
    def load(
        cls, parts: Sequence[PartToMeasure], folder: Path, precedence: Sequence[str] = ()
    ) -> MeasuredCorpus:
        """Load the columns of measured parts.

        `parts` may be in any order. `precedence` lists sources, the first with the highest
        precedence; sources that are not listed follow by name.
        """

        def place(part: PartToMeasure) -> tuple[int, str, int, str]:
            known = part.source in precedence
            at = precedence.index(part.source) if known else len(precedence)
            return at, part.source, part.order, part.name

        table, first = [], 0
        for part in sorted(parts, key=place):
            columns = read_measured(part, folder)
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
