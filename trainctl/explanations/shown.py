"""What rules say of themselves and print for examples: `shown.json`, written by `make docs`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("shown.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRule:
    """A rule as it presents itself."""

    title: str
    """What must hold, or what is found."""
    severity: str
    """``error``, ``warning``, or both."""
    page: str
    """The page of the documentation that has it, without ending."""
    cause: str
    """Why it is there."""
    cure: str
    situation: str = ""
    """Where it comes up, where no typed example brings it about."""
    typed: str = ""
    """The example, as typed; empty where there is none."""
    files: dict[str, str]
    """Files that it needs, by path: their text, cut where it is long."""
    printed: list[str]
    """What is printed then, a line each."""


@cache
def rules() -> dict[str, ShownRule]:
    """Return every rule by its identifier, in their order."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: ShownRule(**fields) for name, fields in read.items()}
