"""Axes of parallelism that may split an architecture of transformers: the axes it was tested on.

`architectures.json` is written by `scripts/architectures.py`, which trains each architecture on
each axis and compares its loss curve with a single process. An architecture that the file does not
list is data parallel only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("architectures.json")
COLUMNS = ("tensor", "norms", "pipeline", "sequence", "context")
"""Axes of parallelism, and `norms`: norms sharded along the sequence between tensor ranks."""


@dataclass(frozen=True, slots=True)
class VerifiedAxes:
    """Content of `architectures.json`."""

    versions: Mapping[str, str]
    """Package versions of the test."""
    steps: int
    """Training steps of each test, in fp32."""
    tolerance: float
    """Largest accepted difference: of a loss in nats, of a norm relative."""
    rows: Mapping[str, Mapping[str, float | str]]
    """Largest difference found, or the reason why the axis may not split the architecture; by
    transformers' `model_type` and by column.
    """


@cache
def architectures_table() -> VerifiedAxes:
    """Return the content of `architectures.json`."""
    raw: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return VerifiedAxes(**raw)


def why_not(model_type: str | None, column: str) -> str | None:
    """Return why an axis may not split an architecture, to end a sentence; None if it may."""
    cells = architectures_table().rows.get(model_type or "")
    if cells is None:
        return f"; shown for {', '.join(architectures_supporting(column))}"
    found = cells[column]
    return f": {found}" if isinstance(found, str) else None


def architectures_supporting(column: str) -> tuple[str, ...]:
    """Return the architectures that an axis may split."""
    return tuple(
        name
        for name, cells in architectures_table().rows.items()
        if not isinstance(cells[column], str)
    )
