"""Where output goes: data to stdout, talk to stderr.

Rich leaves colour out when the stream is no terminal or NO_COLOR is set. Markup is never
interpreted, because what is printed holds paths and values of users.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 100
"""Columns of a table when the output is no terminal."""


def out() -> Console:
    """The console of stdout: what the user asked for."""
    return _console(stderr=False)


def err() -> Console:
    """The console of stderr: findings, hints, errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def say(text: str, *, style: str = "") -> None:
    """One line of talk on stderr, never wrapped."""
    err().print(text, style=style or None, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout, floats at full precision."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def gib(size: float) -> str:
    """Bytes as GiB with a unit, such as ``12.5 GiB``."""
    return f"{size / 2**30:,.2f} GiB"


def short_count(number: float) -> str:
    """A large count in three figures, such as ``6.74 B``."""
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:g}"
