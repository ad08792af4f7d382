"""Which elements of which parameter lie where in the flat tensors that an optimizer updates. Pure.

Whatever the layout, a rank holds some flat tensors. A `Fragment` says which elements of which
parameter lie where in them; the master weights, every optimizer state and the gradients share that
geometry. Norms, changes, saving and loading need nothing else.
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
    """A range of one parameter (of this rank's shard) inside one of the optimizer's tensors."""

    name: str
    """Canonical name of the parameter."""
    start: int
    """First element, in this rank's shard of the parameter, flattened."""
    numel: int
    """Number of elements."""
    tensor: int
    """Index of the optimizer's tensor on this rank."""
    offset: int
    """First element in that tensor, flattened."""
    owned: bool
    """Whether this rank is the one that saves it."""
    shard: Shard | None = None
    """The part of the parameter that this rank has; None means all of it."""
    columns: int = 0
    """If not 0, the range is a block of that many columns of a matrix, and lies transposed in the
    optimizer's tensor."""

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
        """Return a range of what this rank has of a parameter.

        Args:
            start: First element, in the piece, flattened.
            numel: Number of elements.
            tensor: Index of the optimizer's tensor.
            offset: First element in that tensor.
            dealt: Whether it is this replica's to save, of those that hold the same.
        """
        shard = None if piece.shard.is_whole else piece.shard
        return cls(piece.name, start, numel, tensor, offset, dealt and piece.is_saved_here, shard)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements in one of the optimizer's tensors: a view, of any shape, in their order."""
        values = tensor[self.offset : self.offset + self.numel]
        return values.view(self.columns, -1).t() if self.columns else values


@dataclass(frozen=True, slots=True)
class Place:
    """Where some elements of a gradient are in the whole parameter."""

    name: str
    """Canonical name of the parameter."""
    shard: Shard | None
    """The part of it that this rank has; None means all of it."""
    start: int
    """First element, in the flattened shard."""
    numel: int
    """Number of elements."""

    def indices(self, device: torch.device) -> torch.Tensor:
        """Index of each element in the whole, flattened parameter, (numel,)."""
        local = torch.arange(self.start, self.start + self.numel, device=device)
        if self.shard is None:
            return local
        width, row = self.shard.width, self.shard.row
        return local // width * row + self.shard.start + local % width


def cut(
    fragments: Iterable[Fragment], parts: Sequence[torch.Tensor]
) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
    """Something of the geometry of an optimizer's tensor by fragments.

    Args:
        parts: Flat tensors that follow each other, from the tensor's first element on.

    Yields:
        A fragment, the place in its parameter of the first of some values, and these values.
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


def of_transposed(fragment: Fragment, shape: torch.Size) -> Iterator[Fragment]:
    """Yield a range of a transposed matrix: the end of a column, whole columns, the start of
    one."""
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


def square(values: torch.Tensor) -> torch.Tensor:
    """Their summed squares; over a large tensor torch's fp32 norm is off by 1e-4 on a CPU."""
    kind = torch.float64 if values.device.type == "cpu" else torch.float32
    return torch.linalg.vector_norm(values.detach(), dtype=kind).double().square()
