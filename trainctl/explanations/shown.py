"""Rules with their texts and the output of their examples: `shown.json`, written by `make docs`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("shown.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRule:
    """A rule as its documentation shows it."""

    title: str
    """The condition that must hold, or the problem found."""
    severity: str
    """``error``, ``warning``, or both."""
    page: str
    """Page of the documentation, without file extension."""
    cause: str
    """Reason for the rule."""
    cure: str
    situation: str = ""
    """Situation in which the rule is violated; only without an example."""
    typed: str = ""
    """The example's command; empty without an example."""
    files: dict[str, str]
    """Files that the example needs: text by path, cut if long."""
    printed: list[str]
    """Lines that the example prints."""


@cache
def rules() -> dict[str, ShownRule]:
    """Return every rule by its identifier, in order."""
    read = json.loads(FILE.read_text(encoding="utf-8"))
    return {name: ShownRule(**fields) for name, fields in read.items()}
