"""Parquet: one document per row; rows are read in batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from trainctl.config.schema import DataFromRecords
from trainctl.options.data import DataSource
from trainctl.readers.check import FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.tables import (
    ROWS,
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

_BUFFER = 1 << 20
"""Bytes of a column that are read at once, because a row group may be larger than memory."""


def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
    """Yield the texts of a file's rows, or of a range of its row groups, in order."""
    for row, cell in chain.from_iterable(
        read_in_process(_read_texts, file, text_column(reader), span)
    ):
        text = text_of(reader, cell, f"{file}, row {row:,}")
        if text is not None:
            yield Document(text, file, row)


def records(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a file with its number, from 1, and all columns."""
    yield from enumerate(chain.from_iterable(read_in_process(_read_records, file)), 1)


def ranges(file: File, size: int) -> list[tuple[int, int]]:
    """Return ranges of row groups, each with about `size` bytes uncompressed."""
    found = []
    start = total = 0
    (sizes,) = read_in_process(_group_sizes, file)
    for group, each in enumerate(sizes, 1):
        total += each
        if total >= size or group == len(sizes):
            found.append((start, group))
            start, total = group, 0
    return found


def problem(file: File, section: DataFromRecords) -> FileProblem | None:
    """Return a problem of a file's schema, which is at its end; None if there is none."""
    return schema_problem(_check_file, file, section)


def _read_texts(
    file: File, key: str, span: tuple[int, int] | None
) -> Iterator[list[tuple[int, bytes | None]]]:
    with _open_table(file) as table:
        require_texts(table.schema_arrow, file, key)
        groups = range(*(span or (0, table.num_row_groups)))
        row = 1 + sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
        for batch in table.iter_batches(ROWS, row_groups=[*groups], columns=[key]):
            for texts in text_cells(batch.column(key)):
                yield [*enumerate(texts, row)]
                row += len(texts)


def _read_records(file: File) -> Iterator[list[dict[str, Any]]]:
    with _open_table(file) as table:
        for batch in table.iter_batches(ROWS):
            yield from row_records(batch)


def _group_sizes(file: File) -> Iterator[list[int]]:
    with _open_table(file) as table:
        count = table.num_row_groups
        yield [table.metadata.row_group(group).total_byte_size for group in range(count)]


def _check_file(file: File, key: str) -> Iterator[None]:
    """Read the schema of a file and yield nothing."""
    with _open_table(file) as table:
        require_texts(table.schema_arrow, file, key)
        yield from ()


@contextmanager
def _open_table(file: File) -> Iterator[Any]:
    parquet = import_pyarrow("parquet")
    with convert_table_errors(file, "Parquet"):
        source = str(file) if isinstance(file, Path) else file.open()
        with parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False) as table:
            yield table


SPEC = DataSource(
    name="parquet",
    keys=DataFromRecords,
    build=read,
    modules=("pyarrow",),
    endings=(".parquet",),
    ranges=ranges,
    problem=problem,
)
