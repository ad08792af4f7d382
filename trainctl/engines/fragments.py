"""Fragments: ranges of parameters inside the flat tensors that an optimizer updates.

Whatever the layout, a rank holds some flat tensors. A `Fragment` says which elements of which
parameter lie where in them. The master weights, every optimizer state and the gradients share that
layout, so norms, changes, saving and loading need nothing else. All functions here are pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from trainctl.engines.shards import ParameterPiece, Shard


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
    """Return the sum of squares as fp64; on a CPU, torch's fp32 norm would be off by 1e-4."""
    kind = torch.float64 if values.device.type == "cpu" else torch.float32
    return torch.linalg.vector_norm(values.detach(), dtype=kind).double().square()
