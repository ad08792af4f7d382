"""Every parameter of a model as a short list of text, for architectures without a closed form.

An entry is a name and its sizes, `model.layers.{0-47}.mlp.gate.weight 128x2048`; a range stands for
each of these numbers, so that a model of a thousand tensors is a dozen lines. It lies in the
configuration, and with it in every run: later commands and the ranks count by it without torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from trainctl.errors import TrainctlError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_RANGE = re.compile(r"\{(\d+)-(\d+)\}")
_ENTRY = re.compile(r"(\S+) (\d+(?:x\d+)*|scalar)")
_BLOCK = re.compile(r"\.(\d+)\.")

MOST_TENSORS = 1_000_000
"""Far beyond every model, and near enough that a table is read at once."""

Tensor = tuple[str, tuple[int, ...]]


def to_table(tensors: Iterable[Tensor]) -> list[str]:
    """The table of tensors with names and shapes."""
    entries = [(name, "x".join(map(str, shape)) or "scalar") for name, shape in tensors]
    most = max((len(_NUMBER.findall(name)) for name, _ in entries), default=0)
    # The rightmost number first: what is left of it then distinguishes entries like any text.
    for _ in range(most):
        entries = _merged(entries)
    return [f"{name} {sizes}" for name, sizes in entries]


def _merged(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Entries that differ in their last plain number alone, as one for each range of it."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    plain: dict[tuple[str, str, str], None] = {}
    for name, sizes in entries:
        found = list(_NUMBER.finditer(name))
        if not found:
            plain[name, "", sizes] = None
            groups[name, "", sizes] = []
            continue
        last = found[-1]
        key = (name[: last.start()], name[last.end() :], sizes)
        groups.setdefault(key, []).append(int(last[0]))
    merged = []
    for (before, after, sizes), numbers in groups.items():
        if not numbers:
            merged.append((before, sizes))
        for first, end in _ranges(numbers):
            merged.append((f"{before}{{{first}-{end}}}{after}", sizes))
    return merged


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    ordered = sorted(numbers)
    for position, number in enumerate(ordered):
        if position == 0 or ordered[position - 1] != number - 1:
            first = number
        if position + 1 == len(ordered) or ordered[position + 1] != number + 1:
            yield first, number


def from_table(table: Sequence[str]) -> tuple[Tensor, ...]:
    """Names and shapes of a table: what stands before the blocks, block by block, the rest.

    Raises:
        TrainctlError: An entry is none.
    """
    return _expanded(tuple(table))


@lru_cache(maxsize=8)
def _expanded(table: tuple[str, ...]) -> tuple[Tensor, ...]:
    before: list[Tensor] = []
    blocks: dict[int, list[Tensor]] = {}
    after: list[Tensor] = []
    count = 0
    for entry in table:
        for name, shape in _tensors(entry):
            count += 1
            if count > MOST_TENSORS:
                raise TrainctlError(f"model.tensors: more than {MOST_TENSORS:,} tensors")
            found = _BLOCK.search(name)
            if found is not None:
                blocks.setdefault(int(found[1]), []).append((name, shape))
            else:
                (after if blocks else before).append((name, shape))
    inside = [tensor for index in sorted(blocks) for tensor in blocks[index]]
    return (*before, *inside, *after)


def _tensors(entry: str) -> Iterator[Tensor]:
    """What one entry stands for."""
    found = _ENTRY.fullmatch(entry)
    if found is None:
        raise TrainctlError(f"model.tensors: {entry!r} is no name with sizes")
    name, sizes = found.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    start, *rest = _RANGE.split(name)
    numbers = [range(int(a), int(b) + 1) for a, b in zip(rest[::3], rest[1::3], strict=True)]
    if prod(map(len, numbers)) > MOST_TENSORS:
        raise TrainctlError(
            f"model.tensors: {entry!r} stands for more than {MOST_TENSORS:,} tensors"
        )
    for chosen in product(*numbers):
        pieces = zip(map(str, chosen), rest[2::3], strict=True)
        yield start + "".join(number + text for number, text in pieces), shape
