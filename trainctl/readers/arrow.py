"""Shared code of Parquet and Arrow: pyarrow, its errors, and columns of texts; imported late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainctl.readers.columns import NoColumn
from trainctl.readers.remote import File, optional
from trainctl.readers.stream import Damaged

ROWS = 256
"""Rows converted to Python at once."""


def pyarrow(module: str = "") -> Any:
    """Return pyarrow, or a module of it.

    Raises:
        TrainctlError: It is not installed.
    """
    return optional(f"pyarrow.{module}" if module else "pyarrow", "reading Parquet and Arrow")


def require_texts(schema: Any, file: File, column: str) -> None:
    """Refuse a file whose schema lacks the column, or has it twice or without text.

    Raises:
        NoColumn: Names the columns that are there.
    """
    kinds = {field.name: field.type for field in schema}
    twice = {name for name in kinds if schema.names.count(name) > 1}
    if column in kinds and column not in twice and _is_text(kinds[column]):
        return
    texts = [name for name, kind in kinds.items() if _is_text(kind) and name not in twice]
    columns = [
        f"{n!r} twice" if n in twice else repr(n) if n in texts else f"{n!r} ({kind})"
        for n, kind in kinds.items()
    ]
    raise NoColumn(file, column, columns, texts)


def _is_text(kind: Any) -> bool:
    types = pyarrow("types")
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(
        test(kind)
        for test in (
            types.is_string,
            types.is_large_string,
            types.is_string_view,
            types.is_binary,
            types.is_large_binary,
            types.is_binary_view,
        )
    )


def text_cells(column: Any) -> Iterator[list[bytes | None]]:
    """Yield the texts of a column in lists of at most `ROWS`, as bytes that may be invalid UTF-8.

    Raises:
        pyarrow.ArrowInvalid: Offsets or indices lie outside the buffers of the column.
    """
    package = pyarrow()
    if package.types.is_dictionary(column.type):
        values = _as_bytes(column.dictionary)
        values.validate(full=True)
        column = package.DictionaryArray.from_arrays(column.indices, values).dictionary_decode()
    column = _as_bytes(column)
    column.validate(full=True)
    column = column.cast(package.large_binary())
    for start in range(0, len(column), ROWS):
        yield column.slice(start, ROWS).to_pylist()


def _as_bytes(column: Any) -> Any:
    """View texts as bytes: validating text would refuse invalid UTF-8, whatever the policy."""
    package = pyarrow()
    for is_text, kind in (
        (package.types.is_string, package.binary()),
        (package.types.is_large_string, package.large_binary()),
        (package.types.is_string_view, package.binary_view()),
    ):
        if is_text(column.type):
            return column.view(kind)
    return column


def row_records(batch: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of a record batch in lists of at most `ROWS`, with all columns.

    Raises:
        pyarrow.ArrowInvalid: Its buffers are inconsistent, or a text is invalid UTF-8.
    """
    batch.validate(full=True)
    for start in range(0, batch.num_rows, ROWS):
        yield batch.slice(start, ROWS).to_pylist()


@contextmanager
def readable(file: File, what: str) -> Iterator[None]:
    """Convert pyarrow's errors to `Damaged` within this context.

    Args:
        what: Expected format of the file, such as ``Parquet``.
    """
    package = pyarrow()
    try:
        yield
    except (package.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise Damaged(
            f"{file} is no {what}, or cut off or damaged: {_first_line(error)}",
            hint="fetch or write it again",
        ) from None
    except (ValueError, OverflowError) as error:  # Python has no such date, name or duration
        raise Damaged(
            f"{file} has values that cannot be read: {_first_line(error)}",
            hint="write it again without them",
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
