"""Adafactor (arXiv:1804.04235), whose second moment stays factored on any layout.

The update is torch.optim.Adafactor's. Given ZeRO's flat pieces, torch's class finds no matrix to
factor and keeps a whole second moment: more memory, and another update.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from trainctl.engines.shards import Shard
from trainctl.options.optimizer.adafactor import AdafactorConfig
from trainctl.plans import mup
from trainctl.plans.types import RunPlan
from trainctl.train.optimizers.partitioned import Group, ParameterPart, PartitionedOptimizer

DECAY_POWER = -0.8
"""The new squared gradient enters the second moment with weight step ** this (section 7.2)."""
SMALLEST_SCALE = 1e-3
"""Lower bound of a parameter's root mean square in its step size (epsilon 2, section 8)."""
LARGEST_STEP = 1.0
"""Root mean square that the update is clipped to (d, section 6)."""


class Adafactor(PartitionedOptimizer):
    """Adafactor with steps of the learning rate times the parameter's root mean square.

    Every rank with a part of a matrix holds the row and column means of the whole matrix.

    Args:
        eps: Smallest second moment (epsilon 1; torch's `eps[0]` is its root).
    """

    def __init__(self, groups: Iterable[Group], eps: float) -> None:
        super().__init__(groups, {"eps": eps})

    def side_ranges(self, part: ParameterPart) -> dict[str, tuple[int, int, bool]]:
        sizes = {"variance": part.shape.numel()}
        if len(part.shape) > 1:
            columns = part.shape[-1]
            sizes = {"row_var": part.shape.numel() // columns, "col_var": columns}
        return {name: (0, size, part.is_first_here) for name, size in sizes.items()}

    def update(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        parts, step = self.parts(tensor), float(self.state[tensor]["step"])
        new_share, floor = step**DECAY_POWER, group["eps"]
        relative_step = min(group["lr"], step**-0.5)
        statistics = [self._statistics(part, weights, gradient) for part in parts]
        self._sum_cut(parts, statistics)
        scales = []
        change = torch.empty_like(weights)
        for part, (means, weight_square) in zip(parts, statistics, strict=True):
            weight_rms = (weight_square / part.shape.numel()).sqrt()
            scales.append(weight_rms.clamp_(min=SMALLEST_SCALE))
            if not part.is_here:
                continue
            for state, mean in means.items():
                self.side(tensor, part, state).lerp_(mean, new_share)
            variance = self._variance(tensor, part, floor)
            torch.mul(variance.clamp_(min=floor).rsqrt_(), part.of(gradient), out=part.of(change))
        squares: list[tuple[dict[str, Tensor], Tensor]] = [
            ({}, part.of(change).double().square().sum()) for part in parts
        ]
        self._sum_cut(parts, squares)
        weights.mul_(1 - group["lr"] * group["weight_decay"])
        for part, scale, (_, square) in zip(parts, scales, squares, strict=True):
            rms = (square / part.shape.numel()).sqrt()
            size = scale * relative_step / (rms / LARGEST_STEP).clamp(min=1.0)
            part.of(weights).sub_(part.of(change).mul_(size.to(weights.dtype)))

    @staticmethod
    def _statistics(
        part: ParameterPart, weights: Tensor, gradient: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return this replica's share of mean squared gradients and squared weight norm."""
        weight_square = part.of(weights).double().square().sum()
        squares = part.of(gradient).square()
        rows, columns = _lines(part, weights.device)
        if len(part.shape) == 1:
            variance = torch.zeros(part.shape, device=weights.device)
            variance[columns[part.start : part.end]] = squares
            return {"variance": variance}, weight_square
        count = part.shape[-1]
        row_mean = torch.zeros(part.shape.numel() // count, device=weights.device)
        col_mean = torch.zeros(count, device=weights.device)
        if part.is_here:
            first, last, table = _whole_rows(part, squares, columns.numel())
            row_mean[rows[first:last]] = table.sum(dim=1) / count
            col_mean[columns] = table.sum(dim=0) / row_mean.numel()
        return {"row_var": row_mean, "col_var": col_mean}, weight_square

    def _sum_cut(
        self,
        parts: Iterable[ParameterPart],
        statistics: list[tuple[dict[str, Tensor], Tensor]],
    ) -> None:
        """Sum the statistics of split parts over their ranks, in place and together."""
        for sharded in (False, True):
            cut = [
                index
                for index, part in enumerate(parts)
                if part.is_sharded is sharded and (part.is_cut or sharded)
            ]
            if not cut:
                continue
            sums = self.reduce(torch.stack([statistics[i][1] for i in cut]), sharded=sharded)
            for index, total in zip(cut, sums, strict=True):
                statistics[index] = statistics[index][0], total
            means = [mean for index in cut for mean in statistics[index][0].values()]
            if means:
                together = self.reduce(torch.cat(means), sharded=sharded)
                totals = together.split([mean.numel() for mean in means])
                for mean, total in zip(means, totals, strict=True):
                    mean.copy_(total)

    def _variance(self, tensor: Tensor, part: ParameterPart, floor: float) -> Tensor:
        """Return the second moment of the part's elements on this rank."""
        rows, columns = _lines(part, tensor.device)
        if len(part.shape) == 1:
            return self.side(tensor, part, "variance")[columns[part.start : part.end]]
        row_var, width = self.side(tensor, part, "row_var"), columns.numel()
        first, last = part.start // width, -(-part.end // width)
        own = self.side(tensor, part, "col_var")[columns]
        table = torch.outer(row_var[rows[first:last]], own)
        table.div_(row_var.mean().clamp(min=floor**0.5))
        return table.view(-1)[part.start - first * width : part.end - first * width]


def _lines(part: ParameterPart, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the indices of the rows and columns that this tensor rank has of a part's matrix."""
    shard = part.shard or Shard.whole(part.shape)
    return shard.rows_and_columns(part.shape, device)


def _whole_rows(part: ParameterPart, values: Tensor, width: int) -> tuple[int, int, Tensor]:
    """Return the rows [first, last) of this tensor rank's `width` columns that a part touches, with
    zeros outside of the part.
    """
    first, last = part.start // width, -(-part.end // width)
    if part.numel == (last - first) * width:
        return first, last, values.view(-1, width)
    table = torch.zeros((last - first) * width, device=values.device, dtype=values.dtype)
    table[part.start - first * width : part.end - first * width] = values
    return first, last, table.view(-1, width)


def build(plan: RunPlan, groups: list[Group]) -> Adafactor:
    """Return the optimizer of a plan."""
    section = plan.config.optimizer
    assert isinstance(section, AdafactorConfig)
    return Adafactor(groups, mup.scaled_epsilon(plan.config, section.epsilon))
