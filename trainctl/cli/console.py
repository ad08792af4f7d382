"""Output of commands: data on stdout; messages, findings, errors and progress on stderr.

Lines are written unwrapped and uninterpreted, because they hold paths and values of users. Rich,
whose import takes longer than planning, is only for tables and for the live line.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self, TextIO

from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.rules.handbook import hint_line

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.figure import Figure
    from rich.console import Console

PIPE_WIDTH = 100
"""Columns of a table if the output is not a terminal."""

FILE_WIDTH = 10_000
"""Columns of a table whose rows are never wrapped: more than any row has."""

STYLES = {"error": "31", "warning": "33", "good": "32"}
"""Codes of ANSI's Select Graphic Rendition: red, yellow, green."""


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters C0 and C1 except tab and line feed; bidirectional controls; and surrogates,
which stand for bytes of a path that are not UTF-8.
"""

_output = {"is_needed": True}
"""Whether the command's purpose is its output."""


def tolerate_broken_pipe() -> None:
    """Keep the command running when the reader of stdout goes away (`| head`, a closed terminal).

    Called by commands that do more than print: from then on only the output ends.
    """
    _output["is_needed"] = False


def discard_output() -> None:
    """Discard all further output on stdout; otherwise Python complains at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_data(text: str, *, style: str = "") -> None:
    """Print one line of data on stdout, in colour if a style is named and stdout is a terminal.

    Raises:
        OSError: The reader has gone, and `tolerate_broken_pipe` was not called.
    """
    try:
        _write_line(sys.stdout, text, style)
    except OSError as error:
        _handle_broken_pipe(error)


def print_marked_data(
    pieces: Iterable[tuple[str, bool]], *, style: str, marks: tuple[str, str]
) -> None:
    """Print one line of data on stdout with some pieces highlighted.

    Args:
        pieces: Texts, each with whether it is highlighted.
        marks: Texts before and after a highlighted piece if stdout has no colour.
    """
    is_plain = not _has_colour(sys.stdout)
    before, behind = marks if is_plain else (f"\x1b[{STYLES[style]}m", "\x1b[0m")
    line = "".join(
        f"{before}{escape_control_characters(text)}{behind}"
        if is_marked and text
        else escape_control_characters(text)
        for text, is_marked in pieces
    )
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        _handle_broken_pipe(error)


def _has_colour(stream: TextIO) -> bool:
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return stream.isatty() and not is_plain


def _handle_broken_pipe(error: OSError) -> None:
    if _output["is_needed"]:
        raise error
    discard_output()


def print_message(text: str, *, style: str = "") -> None:
    """Print one message on stderr, in colour if a style is named and stderr is a terminal.

    A message that cannot be written (a closed terminal, `2>&1 | head`) is dropped: neither the
    command's work nor its exit code depends on messages.
    """
    with suppress(OSError):
        _write_line(sys.stderr, text, style)


def print_warning(text: str) -> None:
    """Print one warning on stderr."""
    print_message(f"warning: {text}", style="warning")


def _write_line(stream: TextIO, text: str, style: str) -> None:
    text = escape_control_characters(text)
    if style and _has_colour(stream):
        text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
    stream.write(text + "\n")
    stream.flush()


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print one JSON document on stdout, floats at full precision; without `indent` on one line.

    Non-ASCII characters are escaped if the output's encoding is not UTF-8.
    """
    is_ascii = (sys.stdout.encoding or "utf-8").lower() not in ("utf-8", "utf8")
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    # Control characters above 127, and bytes that are no UTF-8, have escapes in JSON as well.
    print_data(_CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def rich_console(*, stderr: bool = False) -> Console:
    """Return a Rich console on stdout or stderr; without colour where `print_data` has none."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        """Console that treats a reader who has gone as `print_data` does."""

        def on_broken_pipe(self) -> None:
            _handle_broken_pipe(BrokenPipeError())

        def render_str(self, text: str, **settings: Any) -> Text:
            return super().render_str(escape_control_characters(text), **settings)

    console = PlainConsole(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


MOST_FITTED_ROWS = 1000
"""Rows of a table that is fitted to the terminal: rich takes a second for as many."""


def _print_columns(rows: Sequence[Sequence[str]], right: set[int]) -> None:
    """Print a long table, whose cells are not wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append(to_printable("  ".join(cells).rstrip()))
    print_data("\n".join(lines))


def print_table(
    heads: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    right: Iterable[int] = (),
    whole: Iterable[int] = (),
    wraps: bool = True,
) -> None:
    """Print a table on stdout, without borders.

    Args:
        right: Indices of right-aligned columns.
        whole: Indices of columns that are never wrapped.
        wraps: Whether rows are fitted to `PIPE_WIDTH` if the output is not a terminal.
    """
    listed = [tuple(row) for row in rows]
    if len(listed) > MOST_FITTED_ROWS:
        _print_columns([tuple(heads), *listed], set(right))
        return
    from rich.table import Table

    console = rich_console()
    table = Table(*heads, box=None, pad_edge=False)
    for column in right:
        table.columns[column].justify = "right"
    for column in whole:
        table.columns[column].no_wrap = True
    for row in listed:
        table.add_row(*row)
    if not wraps and not console.is_terminal:
        # `soft_wrap` alone would still cut cells: a table is laid out for the console's width.
        console.width = FILE_WIDTH
    console.print(table)


def write_chart(draw: Callable[[], Figure], path: Path, *, title: str) -> None:
    """Draw a chart into a file, and say so."""
    from trainctl.monitor.report.figure import save_chart

    save_chart(draw, path, title=title)
    print_message(f"wrote {path}", style="good")


def size_text(size: float) -> str:
    """Format bytes with three digits, such as ``9.68 MiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:g} B"


def escape_control_characters(text: str) -> str:
    r"""Escape control characters, which names of runs and paths may contain, for a terminal.

    Line feeds and tabs stay.

    >>> escape_control_characters("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def to_printable(line: str) -> str:
    """Replace the unprintable characters of a line that a model wrote, such as escape sequences."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def show_findings(findings: Sequence[Finding]) -> None:
    """Print each finding: severity, rule, key and message; then what set the key, and the hint.

    Warnings come first, then errors, then where to read more about all of them.
    """
    findings = sorted(findings, key=lambda finding: finding.is_error)
    for finding in findings:
        about = f"{finding.key}: " if finding.key else ""
        print_message(
            f"{finding.severity}[{finding.rule}]: {about}{finding.message}",
            style=finding.severity.value,
        )
        if finding.source:
            print_message(f"  set by: {finding.source}")
        if finding.hint:
            print_message(f"  hint: {finding.hint}")
    rules = list(dict.fromkeys(finding.rule for finding in findings if finding.rule))
    if rules:
        show_explain_hint(rules)


def show_error(message: str, hint: str = "") -> None:
    """Print one error and its hint."""
    print_message(f"error: {message}", style="error")
    if hint:
        print_message(f"hint: {hint}")


def show_trainctl_error(error: TrainctlError) -> None:
    """Print the findings of an error, then its message and hint.

    Without findings, an exit code other than 2 gets a line on where it is explained.
    """
    show_findings(error.findings)
    show_error(error.message, error.hint)
    if not error.findings and error.exit_code not in (ExitCode.success, ExitCode.bad_input):
        show_explain_hint([str(int(error.exit_code))])


def show_explain_hint(words: list[str]) -> None:
    """Print where rules, a cause or an exit code are explained, as the last line of a message."""
    print_message(f"more: {hint_line(words)}")


def findings_to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as JSON objects."""
    return [finding.to_json() for finding in findings]


LINE_SECONDS = 5.0
"""Interval between two plain lines."""


class Meter:
    """Context manager that shows the progress of consecutive pieces of work.

    Work that ends within its first interval prints no plain line.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._what = ""
        self._last = 0.0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=rich_console(stderr=True),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `what` are done."""
        if self._live is not None:
            if what not in self._tasks:
                self._tasks[what] = self._live.add_task(what)
            self._live.update(self._tasks[what], completed=done, total=total)
            return
        now = time.monotonic()
        if what != self._what:
            self._what, self._last = what, now
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            print_message(f"{what}: {100 * done / max(1, total):.0f} %")
