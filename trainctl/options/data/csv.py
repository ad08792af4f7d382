"""CSV and TSV: one document per row, in the column that the first row names."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import DataFromRecords
from trainctl.config.schema.option import option
from trainctl.errors import TrainctlError
from trainctl.options.data import DataSource
from trainctl.readers.check import FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.files import HEAD_BYTES, binary_format
from trainctl.readers.remote import File
from trainctl.readers.stream import DamagedFile, open_decompressed, read_head, uncompressed_name
from trainctl.readers.tables import NoTextColumn, first_problem, text_column, text_of

MOST_CHARACTERS = 1 << 30
"""Limit of a field. Python's own limit, 2^17, is process-wide and below the length of a book."""


@dataclass
class CsvConfig(DataFromRecords):
    """Keys of CSV."""

    delimiter: str | None = option(
        None, "Field delimiter; none is a tab in .tsv files and a comma in others."
    )


def read(reader: Reader, file: File) -> Iterator[Document]:
    """Yield the texts of a file's rows, each with the number of its first line."""
    found = binary_format(read_head(file, HEAD_BYTES))
    if found is not None:
        raise DamagedFile(
            f"{file} is {found[0]}, not CSV", hint=found[1].replace("FILE", str(file))
        )
    csv.field_size_limit(MOST_CHARACTERS)
    with open_decompressed(file) as stream:
        # Bytes that are not UTF-8 become lone surrogates, and bytes again when a text is encoded.
        text = io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(text, delimiter=_delimiter(reader, file), strict=True)
        header: list[str] = []
        place = 0
        for line, row, wrong in _numbered_rows(rows):
            where = f"{file}:{line}"
            if not header and not wrong:
                header, place = row, _column_index(row, file, text_column(reader))
                continue
            if not wrong and len(row) != len(header):
                wrong = f"{len(row)} fields, where the first row has {len(header)}"
            if wrong:
                reader.apply_bad_text_policy(where, wrong)
                continue
            raw = row[place].encode("utf-8", errors="surrogateescape")
            document = text_of(reader, raw, where)
            if document is not None:
                yield Document(document, file, line)


def problem(file: File, section: CsvConfig) -> FileProblem | None:
    """Return a problem of a file's first rows; None if there is none."""
    return first_problem(file, section, read)


def _numbered_rows(rows: Any) -> Iterator[tuple[int, list[str], str]]:
    """Yield each row with the number of its first line, from 1, and its error, if any; skip empty
    lines.
    """
    while True:
        line = rows.line_num + 1
        try:
            row, wrong = next(rows), ""
        except StopIteration:
            return
        except csv.Error as error:
            row, wrong = [], f"not CSV: {error}"
        if row or wrong:
            yield line, row, wrong


def _delimiter(reader: Reader, file: File) -> str:
    assert isinstance(reader.config, CsvConfig)
    chosen = reader.config.delimiter
    if chosen is None:
        return "\t" if uncompressed_name(file).endswith(".tsv") else ","
    if len(chosen) != 1 or chosen in '"\r\n':
        raise TrainctlError(f"data.delimiter={chosen!r} is not one character", hint="a comma")
    return chosen


def _column_index(header: list[str], file: File, key: str) -> int:
    if header.count(key) == 1:
        return header.index(key)
    columns = [repr(name) if header.count(name) == 1 else f"{name!r} twice" for name in header]
    raise NoTextColumn(file, key, [*dict.fromkeys(columns)], header)


SPEC = DataSource(
    name="csv", keys=CsvConfig, build=read, endings=(".csv", ".tsv"), problem=problem, is_plain=True
)
