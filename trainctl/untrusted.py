"""Names, sizes and counts that a store, a checkpoint or a foreign file gives, checked before use.

A name becomes a path only here, and whole numbers and times of such files are taken only here.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

LARGEST_COUNT = 2**63 - 1
"""Largest size, step or offset: file systems and tensors have no larger ones."""

LARGEST_TIME = 1e11
"""Largest plausible time, in Unix seconds: three thousand years from now."""

_LONGEST_COMPONENT, _LONGEST_PATH = 255, 4095
"""Limits of Linux, in bytes."""


def safe_name(name: Any) -> str:
    """Return a name that is one component of a path and stays in its folder.

    Raises:
        ValueError: It is empty, `.`, `..`, too long, no text, or has a `/`, a control character, or
            what is not UTF-8.
    """
    if (
        not isinstance(name, str)
        or name in ("", ".", "..")
        or "/" in name
        or not name.isprintable()  # NUL, control characters, lone surrogates
        or len(name.encode()) > _LONGEST_COMPONENT
    ):
        raise ValueError(f"{_shown(name)} is no name of a file")
    return name


def safe_path(folder: Path, name: Any) -> Path:
    """Return the path below `folder` that a name of one or more components means.

    Raises:
        ValueError: A component is not safe, as in `safe_name`.
    """
    if not isinstance(name, str) or len(name) > _LONGEST_PATH:
        raise ValueError(f"{_shown(name)} is no path below its folder")
    return folder.joinpath(*map(safe_name, name.split("/")))


def is_count(value: Any) -> bool:
    """Return True for a whole number from 0 to the largest size; no boolean."""
    return type(value) is int and 0 <= value <= LARGEST_COUNT


def is_finite(value: Any) -> bool:
    """Return True for a number that is neither infinite nor larger than any size; no boolean."""
    if type(value) is int:
        return abs(value) <= LARGEST_COUNT
    return type(value) is float and math.isfinite(value)


def is_time(value: Any) -> bool:
    """Return True for a plausible time in Unix seconds."""
    return is_finite(value) and 0 <= value < LARGEST_TIME


def count(value: Any, what: str) -> int:
    """Return a size, step or number of elements; `what` names it in errors.

    Raises:
        ValueError: It is no whole number, negative, or larger than any size.
    """
    if not is_count(value):
        raise ValueError(f"{what} is {_shown(value)}")
    return int(value)


def _shown(value: Any) -> str:
    """Return a value for a message, cut to a line. `repr` of a huge number may be refused."""
    if type(value) is int and abs(value) > LARGEST_COUNT:
        return "a number of 20 digits or more"
    text = ascii(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
