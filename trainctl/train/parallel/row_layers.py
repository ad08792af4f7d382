"""Linear layers that tensor ranks split by inputs, with and without an adapter."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainctl.engines.process import Axis
from trainctl.train.adapters.layers import DoraLayer, LoraLayer
from trainctl.train.parallel.collectives import Reduce, ReduceScatter


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
    return leave.apply(partial, axis)
