"""What a rank adds up over the micro-batches of a step, on its device."""

from __future__ import annotations

from typing import Any

import torch


class Sums:
    """Losses and what is recorded beside them, in fp64: nothing waits for the device until the end.

    Args:
        device: Where the sums are.

    Attributes:
        loss: Sum over what this rank counts, in the objective's unit.
        z_loss: Sum of what is added to it, in its unit.
        measures: Sums of what the objective records, (names,); None where that is nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.z_loss = torch.zeros_like(self.loss)
        self.measures: torch.Tensor | None = None

    def add(self, loss: torch.Tensor, module: Any) -> None:
        """A micro-batch.

        Args:
            module: That gave it: `trainctl.train.objectives.loss.LanguageModel`.
        """
        self.loss += loss.detach()
        if module.last_z_loss is not None:
            self.loss -= module.last_z_loss
            self.z_loss += module.last_z_loss
        if module.last_measures is not None:
            found = module.last_measures.double().sum(dim=0)
            self.measures = found if self.measures is None else self.measures + found

    def tolist(self) -> list[float]:
        """Loss, z loss and measures, read at once: reading makes the host wait for the device."""
        parts = [torch.stack([self.loss, self.z_loss])]
        return torch.cat(parts if self.measures is None else [*parts, self.measures]).tolist()
