"""LAMB (arXiv:1904.00962, algorithm 2), with the norms of whole parameters at any ZeRO stage.

DeepSpeed's kernel takes the norm of the flat piece that ZeRO gives it.
"""

from __future__ import annotations

from typing import Any

import torch

from trainctl.options.optimizer import WithMoments
from trainctl.plan import mup
from trainctl.plan.types import RunPlan
from trainctl.train.optimizers.partitioned import AdamLike


class Lamb(AdamLike):
    """LAMB: AdamW's step, scaled per parameter by the weights' norm over the step's norm.

    As in the authors' own code, norms and biases are not scaled. The paper's phi is the identity.
    """

    def update(
        self,
        tensor: torch.Tensor,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
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
        weight_norms, step_norms = self.reduce(squares).sqrt()
        ratios = torch.where(
            (weight_norms > 0) & (step_norms > 0), weight_norms / step_norms, 1.0
        ).to(weights.dtype)
        for part, ratio in zip(scaled, ratios, strict=True):
            part.of(change).mul_(ratio)
        weights.add_(change, alpha=-group["lr"])


def build(plan: RunPlan, groups: list[dict[str, Any]]) -> Lamb:
    """Return the optimizer of a plan."""
    section = plan.config.optimizer
    assert isinstance(section, WithMoments)
    return Lamb(groups, (section.beta1, section.beta2), mup.epsilon(plan.config, section.epsilon))
