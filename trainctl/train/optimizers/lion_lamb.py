"""Lion (arXiv:2302.06675, algorithm 2) and LAMB (arXiv:1904.00962, algorithm 2).

Lion serves where DeepSpeed has no kernel for it. LAMB takes the norms of whole parameters on any
layout; DeepSpeed's kernel takes the norm of the flat piece that ZeRO gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainctl.options.optimizer import WithBetas
from trainctl.plans.types import RunPlan
from trainctl.train.optimizers.partitioned import AdamLike, Group


class Lamb(AdamLike):
    """LAMB: AdamW's step, scaled per parameter by the weights' norm over the step's norm.

    As in the authors' own code, norms and biases are not scaled. The paper's phi is the identity.
    """

    def update(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        (beta1, beta2), step = group["betas"], float(self.state[tensor]["step"])
        first = self.elementwise(tensor, "exp_avg").lerp_(gradient, 1 - beta1)
        second = self.elementwise(tensor, "exp_avg_sq")
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        change = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        change = torch.div(first / (1 - beta1**step), change, out=change)
        change.add_(weights, alpha=group["weight_decay"])

        scaled = [part for part in self.parts(tensor) if len(part.shape) > 1]
        squares = torch.zeros(2, len(scaled), dtype=torch.float64, device=weights.device)
        for index, part in enumerate(scaled):
            for row, values in enumerate((weights, change)):
                squares[row, index] = torch.linalg.vector_norm(
                    part.of(values), dtype=torch.float64
                ).square()
        for sharded in (False, True):
            some = [index for index, part in enumerate(scaled) if part.is_sharded is sharded]
            squares[:, some] = self.reduce(squares[:, some], sharded=sharded)
        weight_norms, step_norms = squares.sqrt()
        ratios = torch.where(
            (weight_norms > 0) & (step_norms > 0), weight_norms / step_norms, 1.0
        ).to(weights.dtype)
        for part, ratio in zip(scaled, ratios, strict=True):
            part.of(change).mul_(ratio)
        weights.add_(change, alpha=-group["lr"])


build_lamb = Lamb.of


class Lion(Optimizer):
    """Lion: steps by the sign of a mix of momentum and gradient.

    The update is elementwise, so any piece of a parameter may be updated alone.
    """

    def __init__(self, groups: Iterable[Group], betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient, state = parameter.grad, self.state[parameter]
                if gradient is None:
                    continue
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter)
                state["step"] += 1
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                direction = state["exp_avg"].lerp(gradient, 1 - beta1).sign_()
                parameter.add_(direction, alpha=-group["lr"])
                state["exp_avg"].lerp_(gradient, 1 - beta2)


def build_lion(plan: RunPlan, groups: list[Group]) -> Lion:
    """Return the optimizer of a plan."""
    section = plan.config.optimizer
    assert isinstance(section, WithBetas)
    return Lion(groups, (section.beta1, section.beta2))
