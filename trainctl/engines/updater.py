"""How the optimizer that makes an update keeps what is not one number an element."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer


class Updater:
    """As torch's optimizers keep it, and trainctl's own.

    Args:
        optimizer: The one that makes the update.
    """

    counts_alike = True
    """Whether a state that is one number is the same for all of its parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step_count(self, tensor: torch.Tensor, value: float) -> torch.Tensor | int:
        """Return a step count: on the CPU, but beside the tensor where a fused kernel reads it."""
        device = tensor.device if self.optimizer.defaults.get("fused") else "cpu"
        return torch.tensor(value, dtype=torch.float32, device=device)

    def state_type(self, tensor: torch.Tensor) -> torch.dtype:
        """Of the states of a tensor that have its size."""
        return tensor.dtype

    def catch_up(self, scalars: Mapping[str, float]) -> None:
        """Bring the optimizer where its steps would have brought it, beyond the states.

        Args:
            scalars: States that are one number for all of it, such as its step count.
        """
