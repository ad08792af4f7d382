"""Optimizers that DeepSpeed and torch lack, or compute wrongly on ZeRO's pieces; and the parameter
groups of all optimizers.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.engines.shards import ParameterPiece, Pieces
from trainctl.options.optimizer import Maker
from trainctl.plans.optimizers import GroupKey, group_of, group_rate, optimizer_maker, order_groups
from trainctl.plans.types import RunPlan


def own_optimizer(plan: RunPlan, groups: list[dict[str, Any]]) -> Optimizer | None:
    """Return the optimizer of a plan, made by its option's `build`; None if DeepSpeed makes it.

    Raises:
        TrainctlError: A package that it needs is missing.
    """
    if optimizer_maker(plan.config, plan.hardware) is not Maker.trainctl:
        return None
    return function_of("optimizer", plan.config.optimizer.kind)(plan, groups)


def group_key(piece: ParameterPiece, config: RunConfig) -> GroupKey:
    """Return the parameter group of a parameter, by the plan's rule."""
    embedding, head = piece.is_embedding, piece.is_head
    return group_of(config, piece.name, piece.shape, embedding=embedding, head=head)


def parameter_groups(
    pieces: Pieces, config: RunConfig, *, lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """Return the optimizer's groups of a rank's trained parameters, by the plan's rule.

    No group is empty. Experts that other replicas do not have form separate groups (`moe`) under
    the same names.
    """
    members: dict[bool, dict[GroupKey, list[nn.Parameter]]] = {False: {}, True: {}}
    for parameter, piece in pieces.items():
        if not parameter.requires_grad:
            continue
        members[piece.is_expert].setdefault(group_key(piece, config), []).append(parameter)
    return [
        {
            "params": found[key],
            "name": key.name(config),
            "moe": is_expert,
            "uses_muon": key.uses_muon,
            "weight_decay": key.weight_decay,
            "lr": 0.0,
            "peak_lr": group_rate(key, config, lr_scale),
        }
        for is_expert, found in members.items()
        for key in order_groups(found)
    ]
