"""Parquet: a document a row, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainctl.config.schema import DataFromRecords
from trainctl.config.text.arrow import cells, pyarrow, readable, require_texts
from trainctl.config.text.check import TEXT_KEY, FileProblem
from trainctl.config.text.columns import NoColumn, key_of, text_of
from trainctl.config.text.documents import Document, Reader
from trainctl.config.text.remote import File
from trainctl.options.data import DataSource

_BUFFER = 1 << 20
"""Bytes of a column that are read at once: a row group may be larger than memory."""
_ROWS = 256


def read(reader: Reader, file: File, span: tuple[int, int] | None = None) -> Iterator[Document]:
    """The texts of a file's rows, or of a range of its row groups, in order."""
    key = key_of(reader)
    with _opened(file) as table:
        require_texts(table.schema_arrow, file, key)
        groups = range(*(span or (0, table.num_row_groups)))
        row = sum(table.metadata.row_group(group).num_rows for group in range(groups.start))
        for batch in table.iter_batches(_ROWS, row_groups=[*groups], columns=[key]):
            for cell in cells(batch.column(key)):
                row += 1
                text = text_of(reader, cell, f"{file}, row {row:,}")
                if text is not None:
                    yield Document(text, file, row)


def records(file: File) -> Iterator[tuple[int, dict[str, Any]]]:
    """All columns of a file's rows, each row with its number, from 1."""
    with _opened(file) as table:
        rows = (row for batch in table.iter_batches(_ROWS) for row in batch.to_pylist())
        yield from enumerate(rows, 1)


def ranges(file: File, size: int) -> list[tuple[int, int]]:
    """Row groups, so many together that they have about that many bytes unpacked."""
    with _opened(file) as table:
        count = table.num_row_groups
        sizes = [table.metadata.row_group(group).total_byte_size for group in range(count)]
    found = []
    start = total = 0
    for group, each in enumerate(sizes, 1):
        total += each
        if total >= size or group == count:
            found.append((start, group))
            start, total = group, 0
    return found


def problem(file: File, section: DataFromRecords) -> FileProblem | None:
    """What a file's end says of it."""
    try:
        with _opened(file) as table:
            require_texts(table.schema_arrow, file, section.text_key)
        return None
    except NoColumn as error:
        return FileProblem(TEXT_KEY, error.hint, error.message, error.hint, "data.text_key")


@contextmanager
def _opened(file: File) -> Iterator[Any]:
    parquet = pyarrow("parquet")
    with readable(file, "Parquet"):
        source = str(file) if isinstance(file, Path) else file.open()
        with parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False) as table:
            yield table


SPEC = DataSource(
    name="parquet",
    keys=DataFromRecords,
    build="trainctl.options.data.parquet:read",
    extra="data",
    endings=(".parquet",),
    ranges=ranges,
    problem=problem,
)
