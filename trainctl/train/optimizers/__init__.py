"""Optimizers that DeepSpeed and torch do not have, or have wrong on ZeRO's pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from trainctl.config.schema import DataType, OptimizerKind
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan import mup
from trainctl.plan.optimizers import Maker, is_fused, maker
from trainctl.plan.types import RunPlan


def own_optimizer(plan: RunPlan, groups: list[dict[str, Any]]) -> Optimizer | None:
    """The optimizer of a plan; None if DeepSpeed makes it by its JSON.

    Raises:
        TrainctlError: The package of 8-bit states is missing.
    """
    config, hardware = plan.config, plan.hardware
    if maker(config, hardware) is not Maker.trainctl:
        return None
    optimizer = config.optimizer
    betas, eps = (optimizer.beta1, optimizer.beta2), mup.epsilon(config)
    # Each is imported when it is wanted: torchao is an extra package.
    if optimizer.kind is OptimizerKind.lion:
        from trainctl.train.optimizers.lion import Lion

        return Lion(groups, betas)
    if optimizer.kind is OptimizerKind.lamb:
        from trainctl.train.optimizers.lamb import Lamb

        return Lamb(groups, betas, eps)
    if optimizer.kind is OptimizerKind.adafactor:
        from trainctl.train.optimizers.adafactor import Adafactor

        return Adafactor(groups, eps)
    if optimizer.kind is OptimizerKind.adamw_8bit:
        try:
            from trainctl.train.optimizers.adamw_8bit import AdamW8bit
        except ImportError as missing:
            raise TrainctlError(
                f"optimizer.kind=adamw_8bit needs the package torchao ({missing})",
                hint="pip install 'trainctl[fp8]', or optimizer=adamw",
                exit_code=ExitCode.environment,
            ) from None

        return AdamW8bit(groups, betas, eps)
    from trainctl.train.optimizers.muon import MatrixOptimizer

    return MatrixOptimizer(
        groups,
        momentum=optimizer.momentum,
        betas=betas,
        eps=eps,
        fused=is_fused(config, hardware),
        iterate_in=torch.float32 if config.precision.compute is DataType.fp32 else torch.bfloat16,
    )
