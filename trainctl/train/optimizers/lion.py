"""Lion (arXiv:2302.06675, algorithm 2), where DeepSpeed has no kernel for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from trainctl.options.optimizer import WithBetas
from trainctl.plan.types import RunPlan


class Lion(Optimizer):
    """Lion: steps by the sign of a mix of momentum and gradient.

    The update is elementwise, so any piece of a parameter may be updated alone.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], betas: tuple[float, float]) -> None:
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


def build(plan: RunPlan, groups: list[dict[str, Any]]) -> Lion:
    """Return the optimizer of a plan."""
    section = plan.config.optimizer
    assert isinstance(section, WithBetas)
    return Lion(groups, (section.beta1, section.beta2))
