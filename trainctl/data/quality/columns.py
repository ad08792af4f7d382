"""Columns of a part: an array for each measure of its documents, and a manifest written last.

A part's folder has `NAME.bin` for each column (flat, little-endian, rows in the order of the
documents) and `manifest.json`, which describes them. A part without a manifest is not done and is
measured again, so no other bookkeeping is needed, and any process may measure any part. A column
with a variable number of values per row is stored as two: `NAME`, and `NAME.ends` with the end of
each row's values.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import sync_directory, write_json

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
    """Content of `manifest.json`."""

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


def key_of(folder: Path) -> str | None:
    """Return the key of a finished part, None if the part is not done."""
    try:
        key: str = json.loads((folder / MANIFEST).read_bytes())["key"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return key
