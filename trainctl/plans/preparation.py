"""Cost of preparing a corpus of a given size: processor time, traffic, disk and memory by step.

Every constant comes from `preparation_rates.json`, which `scripts/benchmarks/data_executors.py
rates` writes, or is a size of a format. All steps are linear in the text, but for the number of
reads of the shuffle.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

ROW_BYTES = 16
"""Bytes of a row of the shuffle: key and id."""
SORT_PEAK = 4
"""Memory that sorting takes, as a multiple of the size of the rows."""
LEAST_RANGE = 64 << 20
MOST_RANGES = 1024
"""A task sorts in at least 64 MiB, and there are at most 1,024 ranges, unless tasks are allowed
less memory than that takes.
"""
_SIGNATURE = 448
"""Bytes of a MinHash signature of 112 values."""
_HASH = 16
"""Bytes of the hash of a text."""
_BANDS = 16
"""Bands of the rates: those of the default `data.dedup_threshold` of 0.8."""
_OF_A_DOCUMENT = 40
"""Bytes per document in a part and in the corpus: end, origin, hash."""
_DECIDED, _DUPLICATE = 4, 100
"""Bytes of memory of the decision per document, and per duplicate."""


def shuffle_share(rows: int, memory: int) -> int:
    """Return the bytes of rows that one task of a shuffle sorts, of `rows` rows in all.

    `memory` is `data.sort_bytes`.
    """
    needed = rows * ROW_BYTES * SORT_PEAK
    return min(memory, max(LEAST_RANGE, needed // MOST_RANGES)) // SORT_PEAK


def range_bits(rows: int, share: int) -> int:
    """Return the number of leading bits of a key that name its range."""
    return max(0, (rows * ROW_BYTES - 1) // share).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of one step."""

    name: str
    core_hours: float
    hours: float
    """Hours on the given number of cores; the core hours themselves if one process does it."""
    traffic: float
    """Bytes that are read from and written to the store that the machines share."""
    disk: float
    """Bytes that it leaves there."""
    memory: float
    """Bytes of its largest process."""
    constant: str
    """Factor by which it grows, with its unit."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that the store must carry for the step to end in its hours."""
        return self.traffic / (self.hours * 3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationCost:
    """Cost of preparing a corpus, and where it stops growing linearly."""

    tokens: int
    text_bytes: float
    documents: float
    cores: int
    steps: tuple[StepCost, ...]
    limits: tuple[str, ...]
    measured: str
    """Date, machine, versions, text and tokenizer of the rates."""

    @property
    def hours(self) -> float:
        """Hours of all steps, one after another."""
        return sum(step.hours for step in self.steps)


@cache
def preparation_rates() -> dict[str, Any]:
    """Return the measured rates."""
    found: dict[str, Any] = json.loads(
        Path(__file__).with_name("preparation_rates.json").read_bytes()
    )
    return found


def preparation_cost(
    tokens: int, *, cores: int, sort_bytes: int, vocab_size: int, has_filters: bool, bands: int
) -> PreparationCost:
    """Compute the cost of tokenizing, filters, deduplication and assembly.

    Args:
        tokens: Tokens of the corpus before anything is removed.
        sort_bytes: Memory of a task of the shuffle (`data.sort_bytes`).
        bands: Rows of a document in the shuffle: the bands of MinHash, 1 for identical texts only,
            0 if no document is left out.
    """
    rates = preparation_rates()
    scale = tokens / rates["tokens"]
    text, documents = rates["text_bytes"] * scale, rates["documents"] * scale
    duplicates = rates["duplicates"] * scale if bands else 0.0
    ids = tokens * (2 if vocab_size <= 1 << 16 else 4)
    parts = ids + documents * _OF_A_DOCUMENT
    columns = rates["disk"]["columns"] * scale
    rows = round(documents * bands)
    is_near = bands > 1
    pairs = duplicates * (bands * columns / documents if is_near else _HASH)
    read = documents * (_SIGNATURE if is_near else _HASH)
    process = rates["process_bytes"]
    step = partial(_step, scale, cores)
    shuffled = partial(_step, scale, cores, share=bands / _BANDS, memory=process + sort_bytes)
    deciding = documents * _DECIDED + duplicates * _DUPLICATE
    steps = [step("tokenize", 2 * text + parts, parts)]
    if has_filters:
        steps.append(step("filters", text))
    if is_near:
        steps.append(step("signatures", text + columns, columns))
    if bands:
        steps.append(shuffled("shuffle", read + rows * ROW_BYTES))
        steps.append(shuffled("compare", rows * ROW_BYTES + pairs))
        steps.append(step("decide", documents * 24, memory=process + deciding, alone=True))
    steps.append(step("assemble", 2 * parts, parts, alone=True))
    return PreparationCost(
        tokens=tokens,
        text_bytes=text,
        documents=documents,
        cores=cores,
        steps=tuple(steps),
        limits=tuple(_limits(steps, rows, shuffle_share(rows, sort_bytes), deciding)),
        measured=f"{rates['measured']}; {rates['text_bytes'] / 1e6:.0f} MB of generated text, and "
        "a BPE tokenizer of 32,000 ids",
    )


def _step(
    scale: float,
    cores: int,
    name: str,
    traffic: float,
    disk: float = 0.0,
    *,
    memory: float | None = None,
    alone: bool = False,
    share: float = 1.0,
) -> StepCost:
    """Return a step at `scale` times the measured text; one process does it `alone`.

    `share` is the step's work on a text, as a multiple of the measured work.
    """
    rates = preparation_rates()
    seconds, text = rates["seconds"][name] * share, rates["text_bytes"]
    hours = seconds * scale / 3600
    return StepCost(
        name=name,
        core_hours=hours,
        hours=hours if alone else hours / cores,
        traffic=traffic,
        disk=disk,
        memory=rates["process_bytes"] if memory is None else memory,
        constant=f"{float(f'{seconds / text * 1e9:.2g}'):,g} core s/GB of text",
    )


def _limits(steps: Sequence[StepCost], rows: int, share: int, deciding: float) -> Iterator[str]:
    last = steps[-1]
    if rows:
        maps = math.ceil(rows * ROW_BYTES / share)
        reads = maps << range_bits(rows, share)
        yield (
            f"shuffle: {maps:,} files and {reads:,} reads of {rows * ROW_BYTES / reads / 1e3:,.1f} "
            "kB; above 1,024 ranges reads grow with the square of the text and fall with that of "
            "data.sort_bytes"
        )
        yield (
            f"decide: {deciding / 1e9:,.1f} GB in one process ({_DECIDED} bytes a document, "
            f"{_DUPLICATE} a duplicate): a machine's memory is where it stops"
        )
    yield (
        f"assemble: {last.hours:,.1f} h in one process, which writes "
        f"{last.disk / 1e12:,.2f} TB to one disk; separate sources, one run of "
        "data prepare each, divide it"
    )
