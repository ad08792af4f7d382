"""Shards of parameters, and fragments of them inside the flat tensors that an optimizer updates.

A shard is the elements of a whole parameter that a rank's parameter consists of. Flattened, it is
always a block of columns, once the whole parameter is viewed as rows of the right length. A split
of the first dimension is one row cut at two places. A split of the second cuts every row. A
projection that fuses queries, keys and values is cut in each third. So three numbers describe it.

Whatever the layout, a rank holds some flat tensors. A `Fragment` says which elements of which
parameter lie where in them. The master weights, every optimizer state and the gradients share that
layout, so norms, changes, saving and loading need nothing else. All functions of it are pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

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

    def rows_and_columns(
        self, shape: torch.Size, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the indices of the rows and of the columns whose elements make up the shard.

        The rows are those of the parameter viewed as one matrix: a vector is one row, and stacked
        matrices follow each other.
        """
        width = shape[-1]
        rows = torch.arange(shape.numel() // width, device=device)
        columns = torch.arange(width, device=device)
        if self.row > width:
            start, stop = self.start // width, self.stop // width
            rows = rows.view(-1, self.row // width)[:, start:stop].flatten()
        else:
            columns = columns.view(-1, self.row)[:, self.start : self.stop].flatten()
        return rows, columns

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
    gradient_parts: int = 1
    """Number of neighbouring tensor ranks that hold this piece and compute a part of its gradient
    each.
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


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of this rank's shard of one parameter, inside one of the optimizer's tensors."""

    name: str
    """Canonical name of the parameter."""
    start: int
    """First element in this rank's flattened shard of the parameter."""
    numel: int
    tensor: int
    """Index of the optimizer's tensor on this rank."""
    offset: int
    """First element in that tensor, flattened."""
    owned: bool
    """Whether this rank saves it."""
    shard: Shard | None = None
    """The part of the parameter that this rank holds; None means the whole parameter."""
    columns: int = 0
    """Number of matrix columns in the range, which lies transposed in the optimizer's tensor; 0 if
    it is not transposed.
    """

    @classmethod
    def of_piece(
        cls,
        piece: ParameterPiece,
        start: int,
        numel: int,
        tensor: int,
        offset: int,
        *,
        dealt: bool = True,
    ) -> Fragment:
        """Return the fragment for a range of the piece that this rank holds.

        Args:
            start: First element in the flattened piece.
            tensor: Index of the optimizer's tensor.
            offset: First element in that tensor.
            dealt: Whether this replica saves the range, among the replicas that hold it.
        """
        shard = None if piece.shard.is_whole else piece.shard
        return cls(piece.name, start, numel, tensor, offset, dealt and piece.is_saved_here, shard)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the fragment's elements of one of the optimizer's tensors: a view, in the
        parameter's order.
        """
        values = tensor[self.offset : self.offset + self.numel]
        return values.view(self.columns, -1).t() if self.columns else values


@dataclass(frozen=True, slots=True)
class ElementRange:
    """Position of some gradient elements in the whole parameter."""

    name: str
    """Canonical name of the parameter."""
    shard: Shard | None
    """The part of the parameter that this rank holds; None means the whole parameter."""
    start: int
    """First element in the flattened shard."""
    numel: int

    def indices(self, device: torch.device) -> torch.Tensor:
        """Return the index of each element in the whole flattened parameter, (numel,)."""
        local = torch.arange(self.start, self.start + self.numel, device=device)
        if self.shard is None:
            return local
        width, row = self.shard.width, self.shard.row
        return local // width * row + self.shard.start + local % width


def cut_into_fragments(
    fragments: Iterable[Fragment], parts: Sequence[torch.Tensor]
) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
    """Cut flat values that have the layout of an optimizer's tensor into its fragments.

    Args:
        parts: Flat tensors that follow each other, from the first element of the optimizer's
            tensor.

    Yields:
        A fragment, the position of the first value in the fragment's shard, and the values.
    """
    ends = list(accumulate(part.numel() for part in parts))
    for fragment in fragments:
        offset, last = fragment.offset, fragment.offset + fragment.numel
        while offset < last and ends and offset < ends[-1]:
            number = bisect_right(ends, offset)
            begin, end = ends[number] - parts[number].numel(), min(last, ends[number])
            start = fragment.start + offset - fragment.offset
            yield fragment, start, parts[number][offset - begin : end - begin]
            offset = end


def split_transposed(fragment: Fragment, shape: torch.Size) -> Iterator[Fragment]:
    """Yield a range of a transposed matrix as part of a column, whole columns, part of a column."""
    if len(shape) < 2:
        yield fragment
        return
    rows, columns = shape
    position, end = fragment.start, fragment.start + fragment.numel
    while position < end:
        column, row = divmod(position, rows)
        whole = (end - position) // rows if row == 0 else 0
        numel = whole * rows or min(rows - row, end - position)
        yield replace(
            fragment,
            start=row,
            numel=numel,
            offset=fragment.offset + position - fragment.start,
            shard=Shard(columns, column, column + max(1, whole)),
            columns=whole,
        )
        position += numel


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares as fp64."""
    return (
        torch.linalg.vector_norm(values.detach(), dtype=_norm_type(values.device)).double().square()
    )


def fragment_norms(
    found: Sequence[tuple[Fragment, torch.Tensor]],
) -> Iterator[tuple[Fragment, torch.Tensor]]:
    """Yield each fragment with the norm of its values, all values of a device measured at once."""
    for device in {values.device for _, values in found}:
        here = [(fragment, values) for fragment, values in found if values.device == device]
        norms = torch._foreach_norm([values.detach() for _, values in here], 2, _norm_type(device))
        yield from zip((fragment for fragment, _ in here), norms, strict=True)


def _norm_type(device: torch.device) -> torch.dtype:
    """Return the format of norms: on a CPU, torch's fp32 norm would be off by 1e-4."""
    return torch.float64 if device.type == "cpu" else torch.float32
