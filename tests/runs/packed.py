"""Lines as earlier versions wrote steps: their numbers as a list, and its columns once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKED = (
    "learning_rate",
    "learning_rates",
    "grad_norm",
    "grad_norms",
    "tokens",
    "tokens_per_second",
    "mfu",
    "seconds",
    "peak_bytes",
    "samples",
)
"""Fields that went into the list."""


def append_packed(path: Path, events: list[dict[str, Any]]) -> None:
    """Append steps to `events.jsonl` in the packed form."""
    places: dict[str, int] = {}
    with path.open("ab") as stream:
        for event in events:
            columns, row = [], []
            for field in PACKED:
                for place, value in _leaves(event[field], [field]) if field in event else ():
                    columns.append([place])
                    row.append(value)
            names = json.dumps(columns)
            head = {"attempt": event["attempt"], "time": event["time"]}
            if names not in places:
                places[names] = stream.tell()
                record = {"schema": 1, **head, "event": "columns", "at": places[names]}
                stream.write(json.dumps({**record, "names": columns}).encode() + b"\n")
            own = {k: v for k, v in event.items() if k not in (*PACKED, "schema")}
            line = {**own, "at": places[names], "row": row}
            stream.write(json.dumps(line).encode() + b"\n")


def _leaves(value: Any, place: list[str | int]) -> Iterator[tuple[list[str | int], Any]]:
    if value and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, [*place, name])
    elif value and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _leaves(item, [*place, index])
    else:
        yield place, value
