"""Arrow IPC files and streams, and folders saved by `datasets`: one document per row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from trainctl.config.schema import DataFromRecords
from trainctl.errors import TrainctlError
from trainctl.options.data import DataSource
from trainctl.readers.check import FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.stream import DamagedFile
from trainctl.readers.tables import (
    convert_table_errors,
    import_pyarrow,
    read_in_process,
    require_texts,
    row_records,
    schema_problem,
    text_cells,
    text_column,
    text_of,
)

_FILE = b"ARROW1"
"""Magic bytes at the start of a file; a stream starts with the length of its first message."""
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"


def read(reader: Reader, file: File) -> Iterator[Document]:
    """Yield the texts of a file's rows, in order."""
    row = 0
    for texts in read_in_process(_read_texts, file, text_column(reader)):
        for cell in texts:
            row += 1
            text = text_of(reader, cell, f"{file}, row {row:,}")
            if text is not None:
                yield Document(text, file, row)


def records(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a file with its number, from 1, and all columns."""
    yield from enumerate(chain.from_iterable(read_in_process(_read_records, file)), 1)


def problem(file: File, section: DataFromRecords) -> FileProblem | None:
    """Return a problem of a file's schema or end mark; None if there is none."""
    return schema_problem(_check_file, file, section)


def _read_texts(file: File, key: str) -> Iterator[list[bytes | None]]:
    with _open_batches(file, key) as batches:
        for batch in batches:
            yield from text_cells(batch.column(key))


def _read_records(file: File) -> Iterator[list[dict[str, Any]]]:
    with _open_batches(file) as batches:
        for batch in batches:
            yield from row_records(batch)


def _check_file(file: File, key: str) -> Iterator[None]:
    """Open a file and yield nothing; opening checks its schema and end mark."""
    with _open_batches(file, key):
        yield from ()


def choose_files(files: list[File]) -> list[File]:
    """Return the files that `state.json` names in folders saved by `datasets`; elsewhere all files.

    The library's own files beside the data have fixed names, or names that begin with `cache-`.

    Raises:
        TrainctlError: A file that `state.json` names is missing.
    """
    by_name = {str(file): file for file in files}
    found = []
    for name, file in by_name.items():
        folder = name.rpartition("/")[0]
        if file.name == _STATE:
            found += _named_by(file, folder, by_name)
        is_saved = f"{folder}/{_STATE}" in by_name
        is_cached = file.name.startswith("cache-") and f"{folder}/{_INFO}" in by_name
        if not (is_saved or is_cached or file.name in (_INFO, _SPLITS)):
            found.append(file)
    return found


def _named_by(state: File, folder: str, by_name: dict[str, File]) -> list[File]:
    try:
        names = [part["filename"] for part in json.loads(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise TrainctlError(
            f"{state} does not say which files a dataset has: {type(error).__name__}: {error}",
            hint="name them in data.paths, by a glob",
        ) from None
    missing = [name for name in names if f"{folder}/{name}" not in by_name]
    if missing:
        raise TrainctlError(
            f"{state} names {missing[0]}, which is not there", hint="copy the whole folder"
        )
    return [by_name[f"{folder}/{name}"] for name in names]


@contextmanager
def _open_batches(file: File, key: str | None = None) -> Iterator[Iterator[Any]]:
    package = import_pyarrow()
    if file.stat().st_size < len(_END_OF_STREAM):
        raise _cut_off(file)
    with convert_table_errors(file, "Arrow"):
        source = package.memory_map(str(file)) if isinstance(file, Path) else file.open()
        with source:
            head = source.read(len(_FILE))
            if head == _FILE:
                source.seek(0)
                whole = package.ipc.open_file(source)
                if key is not None:
                    require_texts(whole.schema, file, key)
                yield (whole.get_batch(number) for number in range(whole.num_record_batches))
                return
            source.seek(-len(_END_OF_STREAM), 2)
            if source.read(len(_END_OF_STREAM)) != _END_OF_STREAM:
                raise _cut_off(file)
            source.seek(0)
            stream = package.ipc.open_stream(source)
            if key is not None:
                require_texts(stream.schema, file, key)
            yield iter(stream)


def _cut_off(file: File) -> DamagedFile:
    return DamagedFile(
        f"{file} is no Arrow, or cut off: it has no end mark", hint="fetch or write it again"
    )


SPEC = DataSource(
    name="arrow",
    keys=DataFromRecords,
    build=read,
    modules=("pyarrow",),
    endings=(".arrow", ".feather", ".ipc"),
    choose=choose_files,
    problem=problem,
)
