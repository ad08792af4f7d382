"""First pass of an objective whose loss of a record depends on the whole global batch.

Features of every record are gathered without a gradient, the loss of the global batch is a function
of all of them, and its gradient with respect to a rank's own features is what the second pass
backpropagates (arXiv:2101.06983). So the loss depends on no micro-batch, rank or accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F

from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.process import Axis

WholeLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Function from the features of all records, (records, ...), and whether each is counted to the
losses, (records,), and the measures, (records, names).
"""


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Results of the global batch for this rank's records, in the order of its micro-batches."""

    losses: torch.Tensor
    """(records,)"""
    measures: torch.Tensor
    """(records, names)"""
    gradients: tuple[torch.Tensor, ...]
    """Gradient of the summed loss with respect to the features of each micro-batch."""

    @classmethod
    def of(
        cls,
        batches: Sequence[MicroBatch],
        features_of: Callable[[MicroBatch], torch.Tensor],
        whole: WholeLoss,
        data: Axis | None = None,
    ) -> FirstPass:
        """Compute the loss of the global batch; all ranks call it together.

        Each rank computes the whole of it, from all features in the order of their counters.

        Args:
            features_of: Function that runs a forward pass and returns the features, (samples, k,
                ...). k may differ: fewer are padded with zeros, which must be as good as none.
            data: Data-parallel ranks; None if this process is alone.
        """
        with torch.no_grad():
            own = [features_of(batch).float() for batch in batches]
        is_counted = torch.stack([batch.has_labels for batch in batches]).to(own[0].device)
        widths = torch.tensor([features.shape[1] for features in own]).to(own[0].device)
        width = int(_gathered(widths, data).max())
        padded = torch.stack([_padded(features, width) for features in own])
        features = _in_order(_gathered(padded, data)).requires_grad_()
        with torch.enable_grad():
            losses, measures = whole(features, _in_order(_gathered(is_counted, data)))
            (gradient,) = torch.autograd.grad(losses.sum(), features)
        shape = len(own), 1 if data is None else data.size, len(own[0])
        rank = 0 if data is None else data.index
        losses, measures, gradient = (
            each.detach().unflatten(0, shape)[:, rank] for each in (losses, measures, gradient)
        )
        gradients = tuple(each[:, : f.shape[1]] for each, f in zip(gradient, own, strict=True))
        return cls(losses.flatten(), measures.flatten(0, 1), gradients)

    def with_gradients(self, batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches for the second pass."""
        pairs = zip(batches, self.gradients, strict=True)
        return [replace(batch, gradient=gradient) for batch, gradient in pairs]

    def sums(self) -> list[float]:
        """Return the sums of the losses and of each measure over this rank's records."""
        return [float(self.losses.double().sum()), *self.measures.double().sum(dim=0).tolist()]


def _padded(features: torch.Tensor, width: int) -> torch.Tensor:
    """Return (samples, width, ...)."""
    missing = width - features.shape[1]
    return F.pad(features, (0, 0) * (features.dim() - 2) + (0, missing)) if missing else features


def _gathered(own: torch.Tensor, data: Axis | None) -> torch.Tensor:
    """Return the tensors of all data-parallel ranks, (ranks, ...)."""
    if data is None or data.size == 1:
        return own[None]
    found = [torch.empty_like(own) for _ in data.ranks]
    dist.all_gather(found, own.contiguous(), group=data.group)
    return torch.stack(found)


def _in_order(gathered: torch.Tensor) -> torch.Tensor:
    """Return (records, ...) by sample counter, from (ranks, micro-batches, samples, ...)."""
    return gathered.transpose(0, 1).flatten(0, 2)
