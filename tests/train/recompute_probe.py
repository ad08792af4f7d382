"""Runs inside a rank: blocks recomputed on tensor-parallel ranks."""

from typing import Any

import test_recompute as cases_of
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import RowParallel
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from trainctl.config.registry import new_section
from trainctl.train.models.recompute import wrap_blocks


def partitioned(cases: list[Any], process: Any) -> dict[str, Any]:
    """Largest difference of a gradient, and bytes kept, with whole and with partitioned inputs."""
    group = dist.group.WORLD
    model = cases_of.built()
    plain = cases_of.trained(model)
    result = {}
    for mode in ("full", "selective"):
        kept = {}
        for partition in (False, True):
            settings = {"mode": mode, "partition_across_tensor_ranks": partition}
            recomputed, _ = cases_of.wrapped(model, group, **settings)
            loss, gradients, kept[partition] = cases_of.trained(recomputed)
            cases_of.assert_same(plain, (loss, gradients, 0))
        result[mode] = [kept[False], kept[True]]
    return result


class RowParallelBlock(GradientCheckpointingLayer):
    """A block whose product DeepSpeed sums over the ranks, in place."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.weight = nn.Parameter(torch.randn(8, 8, generator=generator))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        summed = RowParallel.apply(dist.group.WORLD, hidden @ self.weight, False)
        return hidden + nn.functional.silu(summed)


def summed_in_place(cases: list[Any], process: Any) -> float:
    """Largest difference between the weight's gradients with `selective` and without."""
    gradients = []
    for mode in ("none", "selective"):
        block = RowParallelBlock(process.rank)
        wrap_blocks(block, new_section("activation_checkpointing", mode))
        hidden = torch.ones(4, 8, requires_grad=True)
        block(hidden).square().sum().backward()
        gradients.append(block.weight.grad)
    return float((gradients[0] - gradients[1]).abs().max())
