"""Muon (kellerjordan.github.io/posts/muon) for the blocks' matrices, AdamW for the rest.

The update of a matrix is torch.optim.Muon's. The matrices that ZeRO or tensor parallelism splits
are shared out over the ranks that hold them: each gathers its share of them, orthogonalises these
and sends the results back. So no split matrix is orthogonalised twice.

DeepSpeed's own Muon under ZeRO orthogonalises before gradients are clipped. The global norm that it
clips by, and reports, is then the norm of the orthogonal matrices: see docs/optimizers.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from trainctl.config.schema import DataType
from trainctl.engines.process import Axis
from trainctl.options.optimizer.muon import MuonConfig
from trainctl.options.precision import precision_of
from trainctl.plans import mup
from trainctl.plans.optimizers import is_fused
from trainctl.plans.types import RunPlan
from trainctl.train.optimizers.partitioned import Group, ParameterPart, PartitionedOptimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7


class MatrixOptimizer(PartitionedOptimizer):
    """Muon for groups with `uses_muon`, AdamW for the others.

    Its name is not Muon, since DeepSpeed treats any class with Muon in its name as its own.

    Args:
        groups: Parameter groups with `lr`, `weight_decay` and `uses_muon`.
        momentum: Nesterov momentum of Muon.
        fused: Whether AdamW uses torch's fused kernel.
        iterate_in: Type in which matrices are orthogonalised and sent: bf16 as in torch, or
            fp32, in which the order of gradient sums hardly changes the result.
    """

    def __init__(
        self,
        groups: Iterable[Group],
        *,
        momentum: float,
        betas: tuple[float, float],
        eps: float,
        fused: bool,
        iterate_in: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(groups, {"momentum": momentum, "betas": betas, "eps": eps})
        self._fused, self._kind = fused, iterate_in

    def update(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        if not group["uses_muon"]:
            self._adamw(tensor, weights, gradient, group)
            return
        lr, momentum = group["lr"], group["momentum"]
        buffer = self.elementwise(tensor, "momentum_buffer").lerp_(gradient, 1 - momentum)
        directions = gradient.lerp(buffer, momentum)
        weights.mul_(1 - lr * group["weight_decay"])
        for part, change in self._orthogonal(self.parts(tensor), directions):
            outputs, inputs = reversed(part.shape) if part.inputs_first else part.shape
            part.of(weights).add_(change, alpha=-lr * math.sqrt(max(1, outputs / inputs)))

    def _orthogonal(
        self, parts: Sequence[ParameterPart], directions: Tensor
    ) -> Iterator[tuple[ParameterPart, Tensor]]:
        """Yield each part on this rank with its share of its orthogonalised matrix."""
        split: dict[tuple[bool, bool], list[ParameterPart]] = {}
        for part in parts:
            if part.is_cut or (part.is_sharded and part.is_here):
                split.setdefault((part.is_cut, part.is_sharded), []).append(part)
            elif part.is_here:
                yield part, self._whole(part.of(directions), part)
        axes = {
            (True, False): self.replicas,
            (False, True): self.tensor,
            (True, True): self.holders,
        }
        for kind, axis in axes.items():
            listed = split.get(kind, ())
            for first in range(0, len(listed), axis.size if axis else 1):
                assert axis is not None
                yield from self._share(listed[first : first + axis.size], directions, axis)

    def _share(
        self, parts: Sequence[ParameterPart], directions: Tensor, axis: Axis
    ) -> Iterator[tuple[ParameterPart, Tensor]]:
        """Orthogonalise up to one split matrix per rank; yield this rank's results.

        All ranks of the axis call this together. They hold the elements of `parts`, and each tensor
        rank has an equal share of them.
        """
        size, mine = axis.size, axis.index
        out = [part.numel for part in parts] + [0] * (size - len(parts))
        own = parts[mine] if mine < len(parts) else None
        back = self._lengths(own) if own else [0] * size
        pieces = torch.cat([part.of(directions) for part in parts]).to(self._kind)
        matrix = pieces.new_empty(sum(back))
        dist.all_to_all_single(matrix, pieces, back, out, group=axis.group)
        del pieces  # makes room for the iteration
        if own is not None:
            matrix = self._joined(matrix, own, back)
            matrix = self._cut_again(self._whole(matrix, own), own, back)
        pieces = matrix.new_empty(sum(out))
        dist.all_to_all_single(pieces, matrix, out, back, group=axis.group)
        for part, change in zip(parts, pieces.split(out[: len(parts)]), strict=True):
            if part.is_here:
                yield part, change

    def _lengths(self, part: ParameterPart) -> list[int]:
        """Return the number of elements on each rank that has some, replica by replica."""
        lengths = [end - start for start, end in part.ranges] if part.is_cut else [part.numel]
        shards = self.tensor.size if part.is_sharded and self.tensor else 1
        return [length for length in lengths for _ in range(shards)]

    def _joined(self, values: Tensor, part: ParameterPart, lengths: list[int]) -> Tensor:
        """Return a whole matrix, flat, from the pieces of all ranks."""
        if part.shard is None or self.tensor is None:
            return values
        whole = values.new_empty(part.shape).view(-1, part.shard.row)
        pieces, size = values.split(lengths), self.tensor.size
        for index, columns in enumerate(whole.split(part.shard.width, dim=1)):
            columns.copy_(torch.cat(pieces[index::size]).view(columns.shape))
        return whole.view(-1)

    def _cut_again(self, values: Tensor, part: ParameterPart, lengths: list[int]) -> Tensor:
        """Return the pieces of all ranks from a whole matrix: the reverse of `_joined`."""
        if part.shard is None or self.tensor is None:
            return values
        size, whole = self.tensor.size, values.view(-1, part.shard.row)
        pieces: list[Tensor] = [values] * len(lengths)
        for index, columns in enumerate(whole.split(part.shard.width, dim=1)):
            pieces[index::size] = columns.reshape(-1).split(lengths[index::size])
        return torch.cat(pieces)

    def _whole(self, values: Tensor, part: ParameterPart) -> Tensor:
        """Return the orthogonalised form of a whole matrix, flat."""
        return orthogonalize(values.view(part.shape), self._kind).reshape(-1)

    def _adamw(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        step = self.state[tensor]["step"] - 1  # torch's function adds 1 itself
        if self._fused:
            step = step.to(weights.device)
        adamw(
            [weights],
            [gradient],
            [self.elementwise(tensor, "exp_avg")],
            [self.elementwise(tensor, "exp_avg_sq")],
            [],
            [step],
            fused=self._fused,
            foreach=False,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonalize(matrix: Tensor, kind: torch.dtype) -> Tensor:
    """Return a matrix with the same singular vectors and with singular values near 1.

    Five steps of the quintic Newton-Schulz iteration of Muon's author, as in torch.optim.Muon.

    Args:
        kind: Type of the iteration and of the result.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(kind, copy=True)
    x = x.T if is_tall else x
    x.div_(x.norm().clamp(min=SMALLEST_NORM))
    for _ in range(STEPS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return x.T if is_tall else x


def build(plan: RunPlan, groups: list[Group]) -> MatrixOptimizer:
    """Return the optimizer of a plan."""
    config, section = plan.config, plan.config.optimizer
    assert isinstance(section, MuonConfig)
    is_fp32 = precision_of(config.precision).format is DataType.fp32
    return MatrixOptimizer(
        groups,
        momentum=section.momentum,
        betas=(section.beta1, section.beta2),
        eps=mup.scaled_epsilon(config, section.epsilon),
        fused=is_fused(config, plan.hardware),
        iterate_in=torch.float32 if is_fp32 else torch.bfloat16,
    )
