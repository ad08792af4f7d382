"""Shards: the elements of a whole parameter that a rank's parameter consists of.

A flattened shard is always a block of columns, once the whole parameter is viewed as rows of the
right length. A split of the first dimension is one row cut at two places. A split of the second
cuts every row. A projection that fuses queries, keys and values is cut in each third. So three
numbers describe a shard, and saving, loading and initialising need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Shard:
    """Columns [start, stop) of the flattened parameter viewed as rows of `row` elements."""

    row: int
    start: int
    stop: int

    @property
    def width(self) -> int:
        """Elements of the shard in a row."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.width == self.row

    @classmethod
    def whole(cls, shape: torch.Size) -> Shard:
        """Return the shard that is the whole parameter of this shape."""
        return cls(shape.numel(), 0, shape.numel())

    @classmethod
    def split(
        cls, shape: torch.Size, *, dim: int, index: int, count: int, fused: int = 1
    ) -> tuple[Shard, torch.Size]:
        """Return one of `count` parts along a dimension, and the shape of the part.

        The parts are equal, but the last is smaller where `count` does not divide the dimension.

        Args:
            shape: Shape of the whole parameter.
            dim: The dimension that is split.
            count: Number of parts; it must divide the dimension if anything is fused.
            fused: Number of equal pieces that follow each other along the dimension; each piece is
                split. It is 3 for queries, keys and values in one matrix.
        """
        inner = shape[dim + 1 :].numel()
        whole = shape[dim] // fused
        first, end = (min(whole, place * -(-whole // count)) for place in (index, index + 1))
        part = torch.Size((*shape[:dim], (end - first) * fused, *shape[dim + 1 :]))
        return cls(whole * inner, first * inner, end * inner), part


@dataclass(frozen=True, slots=True)
class ParameterPiece:
    """The piece of a parameter that this rank holds, and the parameter's role in the model."""

    name: str
    shape: torch.Size
    """Shape of the whole parameter."""
    shard: Shard
    """The part that this rank holds."""
    has_partial_gradient: bool = False
    """Whether each tensor rank computes only a part of the gradient although it holds the whole
    parameter.
    """
    is_saved_here: bool = True
    """Whether this rank's replicas save it; if not, another tensor rank or pipeline stage with the
    same piece does.
    """
    is_embedding: bool = False
    """Whether it is an embedding (also if it is tied to the output projection)."""
    is_head: bool = False
    """Whether it is the weight of the output projection."""
    inputs_first: bool = False
    """Whether the rows of the matrix are its inputs, as in gpt2's Conv1D."""
    is_expert: bool = False
    """Whether the shard holds experts, split along the expert axis: other replicas hold the
    others.
    """


Pieces = dict[nn.Parameter, ParameterPiece]
"""The piece of each parameter that a rank holds."""

Read = Callable[[int, int], torch.Tensor]
"""Reader of elements [start, end) of a flat tensor."""


def read_shard(read: Read, shard: Shard, start: int, end: int) -> torch.Tensor:
    """Return elements [start, end) of a flattened shard, given a reader of the whole flattened
    parameter.
    """
    if shard.is_whole:
        return read(start, end)
    first, last = start // shard.width, -(-end // shard.width)
    if last - first == 1:  # within one row: contiguous in the whole parameter
        base = first * (shard.row - shard.width) + shard.start
        return read(base + start, base + end)
    rows = read(first * shard.row, last * shard.row).view(-1, shard.row)
    columns = rows[:, shard.start : shard.stop].reshape(-1)
    return columns[start - first * shard.width : end - first * shard.width]


def read_whole(parts: Mapping[Shard, Read], start: int, end: int) -> torch.Tensor:
    """Return elements [start, end) of a flattened parameter, from readers of its flattened shards.

    Raises:
        ValueError: The shards do not make up the parameter.
    """
    row = next((shard.row for shard in parts), 0)
    if (
        not parts
        or sum(shard.width for shard in parts) != row
        or any(shard.row != row for shard in parts)
    ):
        raise ValueError("the shards do not make up the parameter")
    first, last = start // row, -(-end // row)
    if last - first == 1:  # within one row: some shards are not needed
        base, result = first * row, torch.empty(end - start)
        for shard, read in parts.items():
            low, high = max(start - base, shard.start), min(end - base, shard.stop)
            if low < high:
                shift = first * shard.width - shard.start
                values = read(low + shift, high + shift)
                result[base + low - start : base + high - start] = values
        return result
    rows = torch.empty(last - first, row)
    for shard, read in parts.items():
        columns = read(first * shard.width, last * shard.width)
        rows[:, shard.start : shard.stop] = columns.view(-1, shard.width)
    return rows.view(-1)[start - first * row : end - first * row]
