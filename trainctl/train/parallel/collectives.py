"""Differentiable collectives over one axis of the mesh.

Each is a pair: one operation on hidden states, (samples, length, width), in the forward pass, and
one on their gradient in the backward pass (arXiv:1909.08053, figure 3; arXiv:2205.05198, section
4).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from trainctl.engines.process import Axis

Transformation = Callable[[torch.Tensor, Axis], torch.Tensor]

_SEQUENCE_DIM = 1


def sum_over(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Return the sum over the axis, on every rank of it."""
    result = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(result, group=axis.group)
    return result


def gather(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return the ranks' tensors concatenated along `dim`, on every rank."""
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in axis.ranks]
    dist.all_gather(parts, tensor, group=axis.group)
    return torch.cat(parts, dim=dim)


def part(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part along `dim`, by default of the sequence."""
    return tensor.chunk(axis.size, dim=dim)[axis.index].contiguous()


def sum_part(tensor: torch.Tensor, axis: Axis, dim: int = _SEQUENCE_DIM) -> torch.Tensor:
    """Return this rank's equal part, along `dim`, of the sum over the axis."""
    parts = [piece.contiguous() for piece in tensor.chunk(axis.size, dim=dim)]
    result = torch.empty_like(parts[0])
    dist.reduce_scatter(result, parts, group=axis.group)
    return result


def _same(tensor: torch.Tensor, axis: Axis) -> torch.Tensor:
    return tensor.view_as(tensor)


def _function(there: Transformation, back: Transformation, meaning: str) -> Any:
    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, axis: Axis) -> torch.Tensor:  # type: ignore[override]
            ctx.axis = axis
            return there(tensor, axis)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            return back(gradient, ctx.axis), None

    Pair.__doc__ = meaning
    return Pair


Copy = _function(_same, sum_over, "Into a region: every rank uses the whole input.")
Reduce = _function(sum_over, _same, "Out of a region: the ranks' partial results are summed.")
GatherToRegion = _function(gather, sum_part, "Into a region, from parts of the sequence.")
ReduceScatter = _function(sum_part, gather, "Out of a region, to parts of the sequence.")
GatherWidth = _function(
    partial(gather, dim=-1),
    partial(sum_part, dim=-1),
    "The ranks' columns side by side, of which each goes on with a part.",
)
Scatter = _function(part, gather, "From the whole sequence to this rank's part.")
GatherSequence = _function(gather, part, "From the ranks' parts to the whole sequence on each.")
