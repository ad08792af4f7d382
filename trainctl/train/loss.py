"""The token-weighted language-modelling loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainctl.train.data import IGNORED_LABEL


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross entropy in nats over the positions that have a label; fp32 scalar.

    Args:
        logits: (samples, length, vocabulary), any floating type; the softmax is in fp32.
        labels: (samples, length), already shifted; IGNORED_LABEL where there is none.
    """
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
