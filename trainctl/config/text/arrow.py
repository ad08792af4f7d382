"""What Parquet and Arrow share: pyarrow, its errors, and columns of texts. It is imported late."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainctl.config.optional import optional
from trainctl.config.text.columns import NoColumn
from trainctl.config.text.remote import File
from trainctl.config.text.stream import Damaged


def pyarrow(module: str = "") -> Any:
    """It, or a module of it.

    Raises:
        TrainctlError: It is not installed.
    """
    return optional(f"pyarrow.{module}" if module else "pyarrow", "reading Parquet and Arrow")


def require_texts(schema: Any, file: File, column: str) -> None:
    """Refuse a file whose schema has no such column, or two, or not of texts.

    Raises:
        NoColumn: It names the columns that are there.
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


def cells(column: Any) -> list[bytes | None]:
    """The bytes of each text; nobody has looked whether they are UTF-8."""
    package = pyarrow()
    if package.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    is_view = package.types.is_string_view(column.type)
    if is_view:
        column = column.cast(package.large_string())
    found: list[bytes | None] = column.cast(package.large_binary()).to_pylist()
    return found


@contextmanager
def readable(file: File, what: str) -> Iterator[None]:
    """Within it, what pyarrow cannot read is a file that is damaged.

    Args:
        file: That is read.
        what: It should be: ``Parquet``.
    """
    package = pyarrow()
    try:
        yield
    except (package.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        why = str(error).partition("\n")[0].rstrip(".")
        raise Damaged(
            f"{file} is no {what}, or cut off or damaged: {why}",
            hint="fetch or write it again",
        ) from None
