"""Updaters of DeepSpeed's own optimizers, which keep states in other forms than torch's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch.optim import Optimizer

from trainctl.engines.updater import Updater


class _CountsInInt(Updater):
    """Updater of DeepSpeedCPULion, whose step count is an int."""

    def step_count(self, tensor: torch.Tensor, value: float) -> int:
        return int(value)


class _FusedLion(_CountsInInt):
    """Updater of FusedLion, which counts steps on the last parameter of a group only and ignores
    them.
    """

    has_uniform_step_count = False


class _CPUAdam(_CountsInInt):
    """Updater of DeepSpeedCPUAdam, whose host kernel keeps values beyond the states."""

    def state_type(self, tensor: torch.Tensor) -> torch.dtype:
        if self.optimizer.fp32_optimizer_states:
            return torch.float32  # also under bf16 master weights
        return tensor.dtype

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Repeat the steps of the kernel's counters, on a tensor of one element.

        CPUAdam keeps the powers of its betas as running products in fp32 (csrc/includes/cpu_adam.h,
        IncrementStep); a power computed at once differs in the last bit.
        """
        one = torch.zeros(1)
        for step in range(1, int(scalars.get("step", 0)) + 1):
            group = self.optimizer.param_groups[0]
            self.optimizer.ds_opt_adam.adam_update(
                self.optimizer.opt_id,
                step,
                0.0,
                *group["betas"],
                group["eps"],
                0.0,
                group["bias_correction"],
                *(one, one, one, one),
            )


_KINDS = {
    DeepSpeedCPUAdam: _CPUAdam,
    DeepSpeedCPULion: _CountsInInt,
    FusedLion: _FusedLion,
}


def updater_of(optimizer: Optimizer) -> Updater:
    """Return the updater for the class of the optimizer that makes the update."""
    found = (adapter for kind, adapter in _KINDS.items() if isinstance(optimizer, kind))
    return next(found, Updater)(optimizer)
