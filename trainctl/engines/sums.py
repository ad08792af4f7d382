"""Sums over the micro-batches of a step, kept on the rank's device."""

from __future__ import annotations

from typing import Any

import torch


class Sums:
    """Losses and recorded measures of a step, in fp64; adding to them does not wait for the device.

    Attributes:
        loss: Sum over this rank's labels (or pairs), in the objective's unit, without the z-loss.
        z_loss: Sum of the z-loss, in the same unit.
        measures: Sums of the objective's measures, (names,); None if it records nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.z_loss = torch.zeros_like(self.loss)
        self.measures: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, module: Any) -> None:
        """Add a micro-batch.

        Args:
            module: The `trainctl.train.objectives.loss.LanguageModel` that computed the loss.
        """
        self.loss += loss.detach()
        if module.last_z_loss is not None:
            self.loss -= module.last_z_loss
            self.z_loss += module.last_z_loss
        if module.last_measures is not None:
            found = module.last_measures.double().sum(dim=0)
            self.measures = found if self.measures is None else self.measures + found

    def tolist(self) -> list[float]:
        """Return loss, z-loss and measures in one read, for which the host waits for the device."""
        parts = [torch.stack([self.loss, self.z_loss])]
        return torch.cat(parts if self.measures is None else [*parts, self.measures]).tolist()
