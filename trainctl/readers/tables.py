"""Tables with a column of texts: Parquet and Arrow by pyarrow, which is imported late.

pyarrow follows offsets that it finds in a file. Its results are validated before use, but what
validation misses, and a file truncated while it is mapped, crash the process by SIGSEGV or SIGBUS.
So a child process reads the tables: only the child dies, and the parent raises an error that names
the file. Both run trainctl and exchange pickles (`trainctl.child_processes`). The parent sends a
function with its arguments, and then asks for one item after the other.
"""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NoReturn

from trainctl.child_processes import ChildProcess, NoReply, ReplyTimeout, serve
from trainctl.config.schema import DataConfig, DataFromRecords
from trainctl.config.suggest import nearest_names
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.readers.check import BAD_TEXT, TEXT_KEY, FileProblem
from trainctl.readers.documents import Document, Reader
from trainctl.readers.remote import File, import_optional
from trainctl.readers.stream import DamagedFile

ROWS = 256
"""Rows converted to Python at once."""


def import_pyarrow(module: str = "") -> Any:
    """Return pyarrow, or a module of it."""
    return import_optional(
        f"pyarrow.{module}" if module else "pyarrow", "reading Parquet and Arrow"
    )


def require_texts(schema: Any, file: File, column: str) -> None:
    """Refuse a file whose schema lacks the column, or has it twice or without text.

    Raises:
        NoTextColumn: Names the columns that are there.
    """
    kinds = {field.name: field.type for field in schema}
    twice = {name for name in kinds if schema.names.count(name) > 1}
    if column in kinds and column not in twice and _is_text_type(kinds[column]):
        return
    texts = [name for name, kind in kinds.items() if _is_text_type(kind) and name not in twice]
    columns = [
        f"{n!r} twice" if n in twice else repr(n) if n in texts else f"{n!r} ({kind})"
        for n, kind in kinds.items()
    ]
    raise NoTextColumn(file, column, columns, texts)


def _is_text_type(kind: Any) -> bool:
    types = import_pyarrow("types")
    if types.is_dictionary(kind):
        return _is_text_type(kind.value_type)
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
    package = import_pyarrow()
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
    package = import_pyarrow()
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

    All structs of a column have the same fields, so a field that an object does not have is null:
    fields of structs that are null are left out. Maps are objects too.

    Raises:
        pyarrow.ArrowInvalid: Its buffers are inconsistent, or a text is invalid UTF-8.
    """
    batch.validate(full=True)
    nested = {field.name: read for field in batch.schema if (read := _object_reader(field.type))}
    for start in range(0, batch.num_rows, ROWS):
        rows = batch.slice(start, ROWS).to_pylist()
        for row in rows:
            row |= {name: read(row[name]) for name, read in nested.items()}
        yield rows


def _object_reader(kind: Any) -> Callable[[Any], Any] | None:
    """Return the function that makes plain objects of a column's values; None if they have none."""
    types = import_pyarrow("types")
    if isinstance(kind, import_pyarrow().BaseExtensionType):
        return _object_reader(kind.storage_type)
    if types.is_struct(kind):
        inner = {field.name: _object_reader(field.type) for field in kind}
        return lambda value: (
            value
            and {
                name: read(each) if (read := inner[name]) else each
                for name, each in value.items()
                if each is not None
            }
        )
    if types.is_map(kind):
        of_items = _object_reader(kind.item_type) or (lambda value: value)
        return lambda value: value if value is None else {k: of_items(v) for k, v in value}
    are_lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    views = (types.is_list_view, types.is_large_list_view)
    is_list = any(test(kind) for test in (*are_lists, *views))
    of_elements = _object_reader(kind.value_type) if is_list else None
    if of_elements is None:
        return None
    return lambda value: value and [of_elements(each) for each in value]


@contextmanager
def convert_table_errors(file: File, what: str) -> Iterator[None]:
    """Convert pyarrow's errors to `DamagedFile` within this context.

    Args:
        what: Expected format of the file, such as ``Parquet``.
    """
    package = import_pyarrow()
    try:
        yield
    except (package.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DamagedFile(
            f"{file} is no {what}, or cut off or damaged: {_first_line(error)}",
            hint="fetch or write it again",
        ) from None
    except (ValueError, OverflowError) as error:  # Python has no such date, name or duration
        raise DamagedFile(
            f"{file} has values that cannot be read: {_first_line(error)}",
            hint="write it again without them",
        ) from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


_SHOWN = 12
_LONGEST = 80
"""Maximum characters of a column name in messages: without a header, the first row may be a whole
text.
"""
_ROWS_READ = 20
"""Rows of each file that are read before the start."""


class NoTextColumn(TrainctlError):
    """A file without a column of texts named by `data.text_key`.

    Args:
        columns: Columns in the file, as shown: a name, or a name with its type if it is not text.
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
        meant = nearest_names(column, names, count=1) or names[:1]
        hint = f"data.text_key={meant[0]}" if meant else "write the text under one key"
        super().__init__(f"{file}: no column {column!r} of texts: {has}", hint=hint)


def text_column(reader: Reader) -> str:
    """Return the name of the column with the texts."""
    assert isinstance(reader.config, DataFromRecords)
    return reader.config.text_key


def text_of(reader: Reader, value: bytes | None, where: str) -> str | None:
    """Decode the text of a cell; None leaves it out.

    Args:
        value: The cell's bytes; None for an empty cell.
    """
    if value is None:
        return reader.apply_bad_text_policy(where, f"no text under {text_column(reader)!r}")
    return reader.decoded(value, where)


def schema_problem(
    look: Callable[[File, str], Iterator[None]], file: File, section: DataFromRecords
) -> FileProblem | None:
    """Return the problem of a file's schema; `look` opens the file in a child process."""
    try:
        for _ in read_in_process(look, file, section.text_key):
            pass
    except NoTextColumn as error:
        return _no_column(error)
    return None


def _no_column(error: NoTextColumn) -> FileProblem:
    return FileProblem(TEXT_KEY, error.hint, error.message, error.hint, "data.text_key")


def first_problem(
    file: File, section: DataConfig, read: Callable[[Reader, File], Iterator[Document]]
) -> FileProblem | None:
    """Return the problem found by reading the first rows of a file, if any."""
    try:
        for _ in islice(read(Reader(section), file), _ROWS_READ):
            pass
    except NoTextColumn as error:
        return _no_column(error)
    except TrainctlError as error:
        if isinstance(error, DamagedFile) or error.exit_code is not ExitCode.bad_input:
            raise
        return FileProblem(BAD_TEXT, error.hint, error.message, error.hint, "data.on_bad_text")
    return None


_CRASHES = {
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGABRT,
    signal.SIGFPE,
    signal.SIGILL,
}
"""Signals by which damaged data kills a process; any other signal has another cause."""

_COMMAND = "from trainctl.readers.tables import serve_items; serve_items()"

SECONDS = 600.0
"""Time limit for one item: far above what `ROWS` rows take, from a slow server too."""
ITEM_BYTES = 1 << 34
"""Limit of one item: `ROWS` rows may hold long documents."""
_STOP = b""
_NEXT = b"next"


class _Process(ChildProcess):
    """A child process, and the environment it was started with."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        super().__init__(["-P", "-c", _COMMAND])

    def item(self) -> tuple[str, Any]:
        """Return the reply to the last question: its kind, and an item or an error."""
        reply: tuple[str, Any] = pickle.loads(self.receive(SECONDS, ITEM_BYTES))
        return reply


_idle: dict[int, _Process] = {}
"""Idle child process by the pid of its parent: a fork of the parent must not share it."""


def read_in_process(
    function: Callable[..., Iterator[Any]], file: File, *rest: Any
) -> Iterator[Any]:
    """Yield the items of ``function(file, *rest)``, which runs in a child process.

    Args:
        function: A module-level function, which pickle finds by its name.

    Raises:
        DamagedFile: The file crashed the process.
        TrainctlError: Raised by the function; or something else ended the process (exit code 4).
    """
    process = _idle.pop(os.getpid(), None)
    if process is not None and process.environment != os.environ:
        process.kill()
        process = None
    process = process or _Process()
    try:
        process.send(pickle.dumps((function, file, *rest)), SECONDS)
        kind, value = process.item()
        while kind == "item":
            process.send(_NEXT, SECONDS)  # the next item is read while this one is used
            yield value
            kind, value = process.item()
    except GeneratorExit:
        try:
            process.item()
            process.ask(_STOP, SECONDS)
            _idle[os.getpid()] = process
        except NoReply:
            process.kill()
        raise
    except ReplyTimeout:
        process.kill()
        raise MachineError(
            f"the process that read {file} gave nothing for {SECONDS:g} s",
            hint="its storage may hang, or the file is made to do that",
        ) from None
    except NoReply:
        raise _exit_error(file, process.kill()) from None
    except BaseException:
        process.kill()
        raise
    _idle[os.getpid()] = process
    if kind == "error":
        raise value


def _exit_error(file: File, code: int) -> TrainctlError:
    if -code in _CRASHES:
        return DamagedFile(
            f"{file} is damaged: the process that read it died by {signal.Signals(-code).name}",
            hint="fetch or write it again",
        )
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return MachineError(
        f"the process that read {file} {how}",
        hint="it may have had too little memory; start again",
    )


def serve_items() -> NoReturn:
    """Answer questions: start to iterate over what a function returns, go on, or stop."""
    items: Iterator[Any] = iter(())

    def answer(question: bytes) -> bytes:
        nonlocal items
        try:
            if question == _STOP:
                items = iter(())  # closes the generator and its files
            elif question != _NEXT:
                function, *arguments = pickle.loads(question)
                items = function(*arguments)
            reply = next((("item", item) for item in items), ("end", None))
        except Exception as error:
            reply = ("error", error)
        return pickle.dumps(reply)

    serve(answer)
