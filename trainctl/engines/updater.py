"""Optimizer states that are not one number per element, and how an optimizer keeps them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer


class Updater:
    """Optimizer states as torch's optimizers, and trainctl's own, keep them."""

    has_uniform_step_count = True
    """Whether a scalar state, such as the step count, is the same for all parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step_count(self, tensor: torch.Tensor, value: float) -> torch.Tensor | int:
        """Return a step count as a state: on the CPU, or on the tensor's device for a fused
        kernel.
        """
        device = tensor.device if self.optimizer.defaults.get("fused") else "cpu"
        return torch.tensor(value, dtype=torch.float32, device=device)

    def state_type(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of the states that have the tensor's size."""
        return tensor.dtype

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Bring the optimizer's internal values, beyond its states, to the step of a checkpoint.

        Args:
            scalars: States that are one number for the whole optimizer, such as its step count.
        """
