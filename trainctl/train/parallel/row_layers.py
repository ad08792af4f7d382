"""Linear layers that tensor ranks split by inputs, with and without an adapter."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainctl.engines.process import Axis
from trainctl.train.adapters.layers import DoraLayer, LoraLayer


class RowLinear(nn.Linear):
    """Linear layer split by inputs: the ranks' products are summed, then the bias is added."""

    axis: Axis
    sequence_sharded: bool

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product."""
        return F.linear(input, self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = _reduce_output(self.product(input), self.axis, self.sequence_sharded)
        return output if self.bias is None else output + self.bias


class RowConv1D(Conv1D):
    """gpt2's Conv1D split by inputs; its weight is (inputs, outputs)."""

    axis: Axis
    sequence_sharded: bool

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product."""
        return x @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _reduce_output(self.product(x), self.axis, self.sequence_sharded) + self.bias


class LoraRow(LoraLayer):
    """LoRA mixin of a layer split by inputs, placed before the layer's class.

    A is split by inputs, B is whole.
    """

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product, with the adapter's part."""
        plain: torch.Tensor = super().product(inputs)  # type: ignore[misc]
        return plain + self.added(self.dropped(inputs))


class DoraRow(DoraLayer):
    """DoRA mixin of a layer split by inputs; row lengths are taken over all ranks' parts."""

    axis: Axis

    def lengths(self, merged: torch.Tensor) -> torch.Tensor:
        squares = merged.float().square().sum(dim=1)
        dist.all_reduce(squares, group=self.axis.group)
        return squares.sqrt().to(merged.dtype)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the scaled product."""
        plain: torch.Tensor = super().product(inputs)  # type: ignore[misc]
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        return self.scaled(plain, inputs, weight)


def row_class(row: nn.Module, kind: type) -> type:
    """Return the class of a layer split by inputs, with the mixin of its adapter if it has one."""
    if not isinstance(row, LoraLayer):
        return kind
    adapter = DoraRow if isinstance(row, DoraLayer) else LoraRow
    return type(kind.__name__, (adapter, kind), {})


def _reduce_output(partial: torch.Tensor, axis: Axis, sequence_sharded: bool) -> torch.Tensor:
    leave = ReduceScatter if sequence_sharded else Reduce
    result: torch.Tensor = leave.apply(partial, axis)
    return result


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


def _paired_function(there: Transformation, back: Transformation, meaning: str) -> Any:
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


Copy = _paired_function(_identity, all_reduce, "Into a region: every rank uses the whole input.")
Reduce = _paired_function(
    all_reduce, _identity, "Out of a region: the ranks' partial results are summed."
)
GatherToRegion = _paired_function(
    all_gather, reduce_scatter, "Into a region, from parts of the sequence."
)
ReduceScatter = _paired_function(
    reduce_scatter, all_gather, "Out of a region, to parts of the sequence."
)
GatherWidth = _paired_function(
    partial(all_gather, dim=-1),
    partial(reduce_scatter, dim=-1),
    "The ranks' columns side by side, of which each goes on with a part.",
)
Scatter = _paired_function(
    split_for_rank, all_gather, "From the whole sequence to this rank's part."
)
GatherSequence = _paired_function(
    all_gather, split_for_rank, "From the ranks' parts to the whole sequence on each."
)
