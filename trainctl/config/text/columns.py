"""Tables with a text in one of their columns: what they share, whatever holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from trainctl.config.schema import DataConfig, DataFromRecords
from trainctl.config.suggest import nearest
from trainctl.config.text.check import BAD_TEXT, TEXT_KEY, FileProblem
from trainctl.config.text.documents import Document, Reader
from trainctl.config.text.remote import File
from trainctl.config.text.stream import Damaged
from trainctl.errors import ExitCode, TrainctlError

_SHOWN = 12
_LONGEST = 80
"""Characters of a name: of a file without names, the first row may be a whole text."""
_ROWS_READ = 20
"""Of each file, before the start."""


class NoColumn(TrainctlError):
    """A file without a text under `data.text_key`.

    Args:
        file: The file.
        column: What was looked for.
        columns: What is there, such as a name, or a name and what is not text in it.
        names: Of those that have texts.
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


def key_of(reader_or_section: Reader | DataConfig) -> str:
    """Return the column that the texts are in."""
    section = reader_or_section
    if isinstance(section, Reader):
        section = section.config
    assert isinstance(section, DataFromRecords)
    return section.text_key


def text_of(reader: Reader, value: bytes | None, where: str) -> str | None:
    """Return the text of a cell; None to leave it out.

    Args:
        reader: Judges what is bad.
        value: Its bytes; None where the row has nothing there.
        where: What it is, for the account and for errors.
    """
    if value is None:
        return reader.judge(where, f"no text under {key_of(reader)!r}")
    return reader.decoded(value, where)


def first_problem(
    file: File, section: DataConfig, read: Callable[[Reader, File], Iterator[Document]]
) -> FileProblem | None:
    """What reading the first rows of a file shows."""
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
