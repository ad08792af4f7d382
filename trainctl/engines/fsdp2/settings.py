"""What the plan tells the engine (`trainctl.plan.fsdp2`), in torch's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from trainctl.plan.fsdp2 import PREFIX
from trainctl.plan.types import RunPlan

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The payload of a plan."""

    reshard_after_forward: bool
    """Whether weights are gathered anew for the backward pass."""
    param_dtype: torch.dtype
    """Format that weights are gathered in."""
    reduce_dtype: torch.dtype
    """Format that gradients are sent in."""
    offload: bool
    """Whether shards, their gradients and states are in host memory."""
    pin_memory: bool
    """Whether that is page-locked, where there is an accelerator."""
    reduce_every_micro_batch: bool
    """Whether gradients are reduced in each backward pass."""
    optimizer: dict[str, Any]
    """Name and arguments of torch's optimizer; empty if the trainer brings one."""

    @classmethod
    def of(cls, plan: RunPlan) -> Settings:
        """Those of a plan."""
        told = plan.settings[PREFIX]
        return cls(
            reshard_after_forward=told["reshard_after_forward"],
            param_dtype=_TYPES[told["param_dtype"]],
            reduce_dtype=_TYPES[told["reduce_dtype"]],
            offload=told["offload"],
            pin_memory=told["pin_memory"],
            reduce_every_micro_batch=told["reduce_every_micro_batch"],
            optimizer=told.get("optimizer", {}),
        )

    @property
    def mixed_precision(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)

    def offload_policy(self, device: torch.device) -> OffloadPolicy:
        """Where shards are between uses, of a model that computes on `device`."""
        if not self.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.pin_memory and device.type != "cpu")

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """torch's optimizer of the groups, each of which has its own rate and decay."""
        made: Optimizer = getattr(torch.optim, self.optimizer["type"])(
            groups, **self.optimizer["params"]
        )
        return made
