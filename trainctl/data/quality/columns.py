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
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import I64, Bool, Entry
from trainctl.errors import RunStateError
from trainctl.runs.files import sync_directory, write_json

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
FORMAT = 1
_UNFINISHED = ".tmp"


class ColumnWriter:
    """Context manager that writes a part's columns, some rows at a time.

    Files are written to a temporary folder, which replaces `folder` when it is complete. `key`
    identifies what was measured, and of which documents; readers compare it. Of two processes that
    write the same part at the same time, the first to finish counts.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self._temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_UNFINISHED}")
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._columns: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> ColumnWriter:
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
        for is_last in (False, True):
            try:
                self._temporary.rename(self._folder)
                break
            except OSError:
                if _manifest(self._folder) == _manifest(self._temporary):
                    break  # another process was faster
                if is_last:
                    raise
                shutil.rmtree(self._folder, ignore_errors=True)
        sync_directory(self._folder.parent)

    def __exit__(self, *_: object) -> None:
        self._files.close()
        shutil.rmtree(self._temporary, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes left in a folder that no other process writes to."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)


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
            raise RunStateError(
                f"{folder} has no columns of a corpus that could be used: {problem}",
                hint="remove it, and prepare the corpus again: what is done is not done again",
            )
        return columns

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
    found = _manifest(folder)
    return found.get("key") if isinstance(found, dict) else None


def _manifest(folder: Path) -> Any:
    try:
        return json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None


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
    size: int = 0
    """Approximate bytes of the documents."""


def columns_folder(part: PartToMeasure, folder: Path) -> Path:
    """Return the folder of a part's columns."""
    return folder / part.source / part.name


_OPEN_PARTS = 16
"""Parts that a process has mapped at a time. Each of about 15 columns keeps a file descriptor, of
which a process may have 1,024 by default.
"""


@lru_cache(maxsize=_OPEN_PARTS)
def _open_columns(folder: Path, version: int) -> Columns:
    return Columns.load(folder)


@dataclass(frozen=True)
class MeasuredPart:
    """A part of the table."""

    source: str
    name: str
    folder: Path
    documents: int
    first: int

    @property
    def columns(self) -> Columns:
        """Columns of the part; the least recently used ones of other parts may be closed."""
        try:
            version = (self.folder / MANIFEST).stat().st_mtime_ns
        except OSError:
            version = 0
        return _open_columns(self.folder, version)

    @property
    def ids(self) -> I64:
        """Ids of the part's documents, [documents]."""
        return np.arange(self.first, self.first + self.documents)

    def among(self, ids: I64) -> Bool:
        """Return the mask of the part's documents in `ids` (ascending), [documents]."""
        found = np.zeros(self.documents, dtype=np.bool_)
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
            at = columns_folder(part, folder)
            documents = Columns.load(at).documents
            table.append(MeasuredPart(part.source, part.name, at, documents, first))
            first += documents
        return cls(table)

    def save(self, path: Path) -> None:
        """Write which parts the table has, for `open` in other processes."""
        parts = [[part.source, part.name, str(part.folder), part.documents] for part in self.parts]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, parts)

    @classmethod
    def open(cls, path: Path) -> MeasuredCorpus:
        """Return the table that `save` wrote; cached per process. Parts are opened when needed."""
        return _open_corpus(path)

    @cached_property
    def firsts(self) -> I64:
        """First id of each part, and the number of all documents, [parts + 1]."""
        return np.array([*(part.first for part in self.parts), self.documents], dtype=np.int64)

    @property
    def documents(self) -> int:
        """Number of rows."""
        last = self.parts[-1] if self.parts else None
        return last.first + last.documents if last is not None else 0

    def where(self, document: int) -> tuple[MeasuredPart, int]:
        """Return a document's part and its number in the part."""
        part = self.parts[int(np.searchsorted(self.firsts, document, side="right")) - 1]
        return part, int(part.columns["number"][document - part.first])

    def rows(self, name: str, ids: I64) -> Array:
        """Return the values of a column for some ids, in the order of the ids."""
        found: list[tuple[I64, Array]] = [
            (places, np.asarray(part.columns[name][rows]))
            for part, places, rows in self._rows_by_part(ids)
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
        for part, places, rows in self._rows_by_part(ids):
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

    def _rows_by_part(self, ids: I64) -> Iterator[tuple[MeasuredPart, I64, I64]]:
        """Yield each part with some of the ids, their positions in `ids`, and their rows."""
        if not len(ids):
            return
        owner = np.searchsorted(self.firsts, ids, side="right") - 1
        order = np.argsort(owner, kind="stable")
        found, begin = np.unique(owner[order], return_index=True)
        for number, places in zip(found.tolist(), np.split(order, begin[1:]), strict=True):
            part = self.parts[number]
            yield part, places, ids[places] - part.first


def key_of_corpus(corpus: MeasuredCorpus, *others: object) -> str:
    """Return a digest of everything measured, in the order of the ids, and of other values."""
    parts: Sequence[object] = [
        (part.source, part.name, part.columns.manifest["key"]) for part in corpus.parts
    ]
    return sha256(json.dumps([parts, others], sort_keys=True).encode()).hexdigest()


@lru_cache(maxsize=2)
def _open_corpus(path: Path) -> MeasuredCorpus:
    parts, first = [], 0
    for source, name, folder, documents in json.loads(path.read_bytes()):
        parts.append(MeasuredPart(source, name, Path(folder), documents, first))
        first += documents
    return MeasuredCorpus(parts)
