"""Collectives of tensor ranks, each with the collective of its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainctl.engines.process import Axis

Transformation = Callable[[torch.Tensor, Axis], torch.Tensor]

_SEQUENCE_DIM = 1


def all_reduce(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over the axis, on every rank of it."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=axis.group)
    return result


def all_gather(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return the ranks' tensors concatenated along `dim`, on every rank."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in axis.ranks]
    dist.all_gather(parts, tensor, group=axis.group)
    return torch.cat(parts, dim=dim)


def split_for_rank(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part along `dim`, by default of the sequence."""
    return tensor.chunk(axis.size, dim=dim)[axis.index].contiguous()


def reduce_scatter(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part, along `dim`, of the sum over the axis."""
    parts = [piece.contiguous() for piece in tensor.chunk(axis.size, dim=dim)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=axis.group)
    return result


def _identity(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    return tensor.view_as(tensor)


def _paired_function(there: Transformation, back: Transformation) -> Any:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:  # type: ignore[override]
            ctx.axis = axis
            return there(tensor, axis)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return back(gradient, ctx.axis), None

    return Pair


Copy = _paired_function(_identity, all_reduce)
"""Into a region: every rank uses the whole input."""
Reduce = _paired_function(all_reduce, _identity)
"""Out of a region: the ranks' partial results are summed."""
GatherToRegion = _paired_function(all_gather, reduce_scatter)
"""Into a region, from parts of the sequence."""
ReduceScatter = _paired_function(reduce_scatter, all_gather)
"""Out of a region, to parts of the sequence."""
GatherWidth = _paired_function(partial(all_gather, dim=-1), partial(reduce_scatter, dim=-1))
"""The ranks' columns side by side, of which each goes on with a part."""
Scatter = _paired_function(split_for_rank, all_gather)
"""This rank's part of the whole sequence."""
GatherSequence = _paired_function(all_gather, split_for_rank)
"""The whole sequence on each rank, of the ranks' parts."""
ScatterRows = _paired_function(partial(split_for_rank, dim=0), partial(all_gather, dim=0))
"""This rank's part of all rows."""
GatherRows = _paired_function(partial(all_gather, dim=0), partial(split_for_rank, dim=0))
"""All rows on each rank, of the ranks' parts."""
