"""Shared code of tables with a column of texts, independent of the file format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from trainctl.config.schema import DataConfig, DataFromRecords
from trainctl.config.suggest import nearest
from trainctl.errors import ExitCode, TrainctlError
from trainctl.readers.check import BAD_TEXT, TEXT_KEY, FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File
from trainctl.readers.stream import Damaged

_SHOWN = 12
_LONGEST = 80
"""Maximum characters of a column name in messages: without a header, the first row may be a whole
text.
"""
_ROWS_READ = 20
"""Rows of each file that are read before the start."""


class NoColumn(TrainctlError):
    """A file without a column of texts named by `data.text_key`.

    Args:
        column: The column that was looked for.
        columns: Columns in the file, as shown: a name, or a name with its type if it is not text.
        names: Names of the columns that have texts.
    """

    def __init__(
        self, file: File, column: str, columns: Sequence[str], names: Sequence[str]
    ) -> None:
        shown = [
            name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…" for name in columns[:_SHOWN]
        ]
        more = [f"{len(columns) - _SHOWN} more"] if len(columns) > _SHOWN else []
        has = f"it has {', '.join([*shown, *more])}" if columns else "it has none"
        names = [name for name in names if len(name) <= _LONGEST]
        meant = nearest(column, names, count=1) or names[:1]
        hint = f"data.text_key={meant[0]}" if meant else "write the text under one key"
        super().__init__(f"{file}: no column {column!r} of texts: {has}", hint=hint)


def text_column(reader_or_section: Reader | DataConfig) -> str:
    """Return the name of the column with the texts."""
    section = reader_or_section
    if isinstance(section, Reader):
        section = section.config
    assert isinstance(section, DataFromRecords)
    return section.text_key


def text_of(reader: Reader, value: bytes | None, where: str) -> str | None:
    """Decode the text of a cell; None leaves it out.

    Args:
        value: The cell's bytes; None for an empty cell.
        where: Place of the cell, for errors and examples of bad text.
    """
    if value is None:
        return reader.apply_bad_text_policy(where, f"no text under {text_column(reader)!r}")
    return reader.decoded(value, where)


def first_problem(
    file: File, section: DataConfig, read: Callable[[Reader, File], Iterator[Document]]
) -> FileProblem | None:
    """Return the problem found by reading the first rows of a file, if any."""
    try:
        for _ in islice(read(Reader(section), file), _ROWS_READ):
            pass
    except NoColumn as error:
        return FileProblem(TEXT_KEY, error.hint, error.message, error.hint, "data.text_key")
    except TrainctlError as error:
        if isinstance(error, Damaged) or error.exit_code is not ExitCode.bad_input:
            raise
        return FileProblem(BAD_TEXT, error.hint, error.message, error.hint, "data.on_bad_text")
    return None
