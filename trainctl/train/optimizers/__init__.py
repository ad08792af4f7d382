"""Optimizers that DeepSpeed and torch lack, or compute wrongly on ZeRO's pieces."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from trainctl.config.registry import function_of
from trainctl.options.optimizer import Maker
from trainctl.plan.optimizers import optimizer_maker
from trainctl.plan.types import RunPlan


def own_optimizer(plan: RunPlan, groups: list[dict[str, Any]]) -> Optimizer | None:
    """Return the optimizer of a plan, made by its option's `build`; None if DeepSpeed makes it.

    Raises:
        TrainctlError: A package that it needs is missing.
    """
    if optimizer_maker(plan.config, plan.hardware) is not Maker.trainctl:
        return None
    made: Optimizer = function_of("optimizer", plan.config.optimizer.kind)(plan, groups)
    return made
