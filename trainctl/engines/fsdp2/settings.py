"""Settings of the FSDP2 engine in a plan (`trainctl.plan.fsdp2`), as torch's types."""

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
    """Settings of the engine, read from a plan."""

    reshard_after_forward: bool
    """Whether weights are freed after the forward pass and gathered again for the backward pass."""
    param_dtype: torch.dtype
    """Format in which weights are gathered."""
    reduce_dtype: torch.dtype
    """Format in which gradients are reduced."""
    offload: bool
    """Whether shards, their gradients and states are in host memory."""
    pin_memory: bool
    """Whether offloaded shards are in page-locked memory; without an accelerator they never are."""
    reduce_every_micro_batch: bool
    """Whether gradients are reduced in each backward pass, rather than once a step."""
    optimizer: dict[str, Any]
    """Class name and arguments of torch's optimizer; empty if the trainer builds its own."""

    @classmethod
    def of(cls, plan: RunPlan) -> Settings:
        """Return the settings in a plan."""
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
        """Return the offload policy of a model that computes on `device`."""
        if not self.offload:
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.pin_memory and device.type != "cpu")

    def make_optimizer(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Return torch's optimizer over parameter groups, each of which has its own rate and
        decay.
        """
        made: Optimizer = getattr(torch.optim, self.optimizer["type"])(
            groups, **self.optimizer["params"]
        )
        return made
