"""Where output goes: data to stdout, talk to stderr.

Lines are written as they are: never wrapped, and nothing in them is interpreted, because they hold
paths and values of users. Rich, whose import takes longer than planning, is only for tables and
for the live line.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100
"""Columns of a table when the output is no terminal."""

STYLES = {"error": "31", "warning": "33", "good": "32"}
"""Codes of ANSI's Select Graphic Rendition: red, yellow, green."""


def put(text: str, *, style: str = "") -> None:
    """One line of data on stdout, in colour if a style is named and stdout is a terminal."""
    _write(sys.stdout, text, style)


def say(text: str, *, style: str = "") -> None:
    """One line of talk on stderr, in colour if a style is named and stderr is a terminal."""
    _write(sys.stderr, text, style)


def _write(stream: TextIO, text: str, style: str) -> None:
    if style and stream.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\x1b[{STYLES[style]}m{text}\x1b[0m"
    stream.write(text + "\n")
    stream.flush()


def print_json(value: Any) -> None:
    """One JSON document on stdout, floats at full precision."""
    put(json.dumps(value, indent=2, ensure_ascii=False))


def rich_console(*, stderr: bool = False) -> Console:
    """Rich on stdout or stderr, for what needs it; without colour where `put` has none."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def gib(size: float) -> str:
    """Bytes as GiB with a unit, such as ``12.50 GiB``."""
    return f"{size / 2**30:,.2f} GiB"


def size_text(size: float) -> str:
    """Bytes in three figures, such as ``9.68 MiB``."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:g} B"


def printable(line: str) -> str:
    """A line that a model wrote, without the escape sequences that a terminal would obey."""
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


def short_count(number: float) -> str:
    """A large count in three figures, such as ``6.74 B``."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"
