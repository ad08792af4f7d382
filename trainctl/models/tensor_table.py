"""Compact table of a model's tensors and modules, as a short list of strings.

An entry is a name and a description, `model.layers.{0-47}.mlp.gate.weight 128x2048 router`. A range
stands for each of its numbers, so that a model of a thousand tensors takes a dozen lines. The table
is part of the configuration, and so of every run (`trainctl.models.anatomy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod

from trainctl.errors import TrainctlError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_RANGES = re.compile(r"\{(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)\}")
_ENTRY = re.compile(r"(\S+) (\S.*)")
_BLOCK = re.compile(r"\.(\d+)(?:\.|$)")

MOST_TENSORS = 1_000_000
"""Bound far above every model, and low enough that a table is read quickly."""

Entry = tuple[str, str]


def to_table(entries: Iterable[Entry]) -> list[str]:
    """Return the table of pairs of a name and its description."""
    merged = list(entries)
    most = max((len(_NUMBER.findall(name)) for name, _ in merged), default=0)
    # The rightmost number first: numbers to its left still keep entries apart as text.
    for _ in range(most):
        merged = _merged(merged)
    return [f"{name} {said}" for name, said in merged]


def _merged(entries: list[Entry]) -> list[Entry]:
    """Merge entries that differ only in the last plain number of their names."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for name, said in entries:
        found = list(_NUMBER.finditer(name))
        if not found:
            groups[name, "", said] = []
            continue
        last = found[-1]
        key = (name[: last.start()], name[last.end() :], said)
        groups.setdefault(key, []).append(int(last[0]))
    return [
        (f"{before}{{{_ranges(numbers)}}}{after}" if numbers else before, said)
        for (before, after, said), numbers in groups.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def from_table(table: Sequence[str]) -> tuple[Entry, ...]:
    """Return the entries of a table: those before the blocks, then block by block, then others.

    Raises:
        TrainctlError: An entry is malformed, or there are more than `MOST_TENSORS`.
    """
    before: list[Entry] = []
    blocks: dict[int, list[Entry]] = {}
    after: list[Entry] = []
    count = 0
    for entry in table:
        for name, said in _expanded(entry):
            count += 1
            if count > MOST_TENSORS:
                raise TrainctlError(f"model.anatomy: more than {MOST_TENSORS:,} tensors")
            found = _BLOCK.search(name)
            if found is not None:
                blocks.setdefault(int(found[1]), []).append((name, said))
            else:
                (after if blocks else before).append((name, said))
    inside = [entry for index in sorted(blocks) for entry in blocks[index]]
    return (*before, *inside, *after)


def _expanded(entry: str) -> Iterator[Entry]:
    """Yield the entries that one line of the table stands for."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise TrainctlError(f"model.anatomy: {entry!r} is no name and what is said of it")
    name, said = found.groups()
    start, *rest = _RANGES.split(name)
    numbers = [_numbers(ranges) for ranges in rest[::2]]
    if prod(sum(map(len, ranges)) for ranges in numbers) > MOST_TENSORS:
        raise TrainctlError(
            f"model.anatomy: {entry!r} stands for more than {MOST_TENSORS:,} tensors"
        )
    for chosen in product(*([n for each in ranges for n in each] for ranges in numbers)):
        pieces = zip(map(str, chosen), rest[1::2], strict=True)
        yield start + "".join(number + text for number, text in pieces), said


def _numbers(ranges: str) -> list[range]:
    """Parse the numbers of `0-3,5`."""
    ends = [tuple(map(int, each.split("-"))) for each in ranges.split(",")]
    return [range(each[0], each[-1] + 1) for each in ends]
