"""Checks of config values that are written into a scheduler's files or command lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from trainctl.errors import Finding

UNSAFE_WORD, UNSAFE_PATH, UNSET = "TC160", "TC161", "TC168"

_WORD = re.compile(r"[A-Za-z0-9_.,:;+@%/=&|*()\[\]?!~^-]+")
"""Pattern of names of partitions, accounts, features, dependencies, resources, images: no space, no
quote, no `$`, no backquote and no control character, so that every reader sees a single word.
"""


def check_words(values: Iterable[tuple[str, str | None]]) -> Iterator[Finding]:
    """Yield a finding for each value that is not a single word, or starts like an option.

    Args:
        values: Config keys and their values; None is skipped.
    """
    for key, value in values:
        if value is None:
            continue
        if not _WORD.fullmatch(value) or value.startswith("-"):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{key}={value!r} is not a plain word",
                hint="letters, digits and _.,:;+@%/=&|*()[]?!~^- without spaces, and no - in front",
            )


def check_programs(values: Iterable[tuple[str, str | None]]) -> Iterator[Finding]:
    """Yield a finding for each program that is empty or would be read as an option.

    Args:
        values: Config keys and their values, names or paths; None is skipped.
    """
    for key, value in values:
        if value is not None and (value.startswith("-") or not value.strip()):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{key}={value!r} is no name and no path of a program",
                hint="an absolute path, or a name in PATH, without - in front",
            )


def check_options(key: str, options: Iterable[str]) -> Iterator[Finding]:
    """Yield a finding for each option that is not `--name` or `--name=VALUE` of plain words."""
    for option in options:
        name, equals, value = option.partition("=")
        is_name = re.fullmatch(r"--[a-z][a-z0-9-]*", name) is not None
        if not is_name or (equals and not _WORD.fullmatch(value)):
            yield Finding(
                rule=UNSAFE_WORD,
                key=key,
                message=f"{option!r} in {key} is no option of the form --name=VALUE",
                hint=f"{key}=['--name=VALUE']",
            )


def check_path(path: Path) -> Iterator[Finding]:
    """Yield a finding for a path with control characters, which a script's line cannot hold."""
    if any(ord(character) < 32 or ord(character) == 127 for character in str(path)):
        yield Finding(
            rule=UNSAFE_PATH,
            message=f"the run directory's path has control characters: {str(path)!r}",
            hint="name another directory with --run-dir",
        )
