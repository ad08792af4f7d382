"""Signum (arXiv:1802.04434): the sign of a momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import OptimizerConfig
from trainctl.config.schema.option import option
from trainctl.options.optimizer import Optimizer, Update, WidthRule


@dataclass
class SignumKeys(OptimizerConfig):
    """Keys of `optimizer=signum`, beside those of every optimizer."""

    smoothing: float = option(0.9, "Decay of the momentum.", minimum=0, maximum=0.999)


def build(plan: Any, groups: list[dict[str, Any]]) -> Any:
    """Build the plan's optimizer. Ranks call this, so torch is imported here."""
    import torch

    class SignumRule(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None:
                        continue
                    state = self.state[parameter]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    state["step"] += 1
                    momentum = state["momentum_buffer"]
                    momentum.lerp_(parameter.grad, 1 - group["smoothing"])
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(momentum.sign(), alpha=-group["lr"])

    smoothing = plan.config.optimizer.smoothing
    return SignumRule(groups, {"lr": 0.0, "weight_decay": 0.0, "smoothing": smoothing})


SPEC = Optimizer(
    name="signum",
    keys=SignumKeys,
    build=build,
    needs="the element",
    states=("momentum_buffer",),
    is_ours_because="neither torch nor DeepSpeed has it",
    why_not={
        "cpu": "nothing updates its state in host memory",
        "nvme": "nothing updates its state in host memory",
        "states": "a momentum in bf16 drops what a step adds to it",
    },
    update=Update(moments=((4, 0),), by_tensor=True),
    width_rule=WidthRule.adam,
)
