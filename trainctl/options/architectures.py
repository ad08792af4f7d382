"""Which axes may cut an architecture of transformers: those along which it was trained.

`architectures.json` is written by `scripts/architectures.py`, which trains each architecture on
each axis and compares the curve with that of one process. What is not in it is data parallel only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("architectures.json")
COLUMNS = ("tensor", "norms", "pipeline", "sequence")
"""Axes, and sequence-sharded norms between tensor ranks."""


@dataclass(frozen=True, slots=True)
class ShownAxes:
    """What the file says."""

    versions: Mapping[str, str]
    """Packages that it was made with."""
    steps: int
    """Steps that each cell was trained for, in fp32."""
    tolerance: float
    """Largest difference of a loss in nats, and of a norm relatively."""
    rows: Mapping[str, Mapping[str, float | str]]
    """Largest difference there was, or why the axis may not cut it, by transformers' name of the
    architecture and by column."""


@cache
def table() -> ShownAxes:
    """Return the file's content."""
    raw: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return ShownAxes(**raw)


def why_not(model_type: str | None, column: str) -> str | None:
    """Why an axis may not cut an architecture; None if it may."""
    cells = table().rows.get(model_type or "")
    if cells is None:
        return f"; shown for {', '.join(cutting(column))}"
    found = cells[column]
    return f": {found}" if isinstance(found, str) else None


def cutting(column: str) -> tuple[str, ...]:
    """Return the architectures that an axis may cut."""
    return tuple(name for name, cells in table().rows.items() if not isinstance(cells[column], str))
