"""Contrastive learning: embeddings of texts, and their loss over the global batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainctl.options.objective.contrastive import ContrastiveConfig, Pooling
from trainctl.train.objectives.base import Measured, SeenHiddenStates, WholeBatch


def embeddings(config: ContrastiveConfig, seen: SeenHiddenStates) -> torch.Tensor:
    """Return the normalised embedding of each text, (samples, texts, width); 0 where a sample has
    fewer texts.
    """
    return F.normalize(pooled(seen, config.pooling), dim=-1)


def pooled(seen: SeenHiddenStates, pooling: Pooling) -> torch.Tensor:
    """Return one vector for each document, (samples, documents, width), fp32; 0 where a sample has
    fewer documents.
    """
    documents = seen.beside.documents.masked_fill(~seen.is_counted, -1)
    numbers = torch.arange(int(documents.max().clamp(min=0)) + 1, device=documents.device)
    is_own = documents[:, None] == numbers[:, None]  # (samples, documents, length)
    if pooling is Pooling.mean:
        weights = is_own / is_own.sum(dim=-1, keepdim=True).clamp(min=1)
    else:
        so_far = is_own.cumsum(dim=-1)
        at = so_far[..., -1:] if pooling is Pooling.last else 1
        weights = (is_own & (so_far == at)).float()
    return weights @ seen.hidden.float()


def contrastive(config: ContrastiveConfig, batch: WholeBatch) -> Measured:
    """Return the cross entropy of finding each query's similar text among all texts of the batch.

    It is that of `MultipleNegativesRankingLoss` in sentence-transformers: the candidates are the
    similar texts and the negatives of all records. `symmetric` adds the direction `doc_to_query`.
    """
    queries, texts = batch.features[:, 0], batch.features[:, 1:].transpose(0, 1)
    own = torch.arange(len(queries), device=queries.device)
    is_text = (texts.detach().square().sum(dim=-1) > 0).flatten()
    cosines = queries @ texts.flatten(0, 1).T

    def scores_of(cosines: torch.Tensor, is_candidate: torch.Tensor) -> torch.Tensor:
        scores = (cosines / config.temperature).masked_fill(~is_candidate, -torch.inf)
        return torch.where(batch.is_counted[:, None], scores, 0.0)  # else all -inf in padding

    scores = scores_of(cosines, is_text)
    losses = F.cross_entropy(scores, own, reduction="none")
    if config.symmetric:
        backwards = scores_of(cosines[:, : len(own)].T, batch.is_counted)
        losses = (losses + F.cross_entropy(backwards, own, reduction="none")) / 2
    return losses, {
        "accuracy": (scores.argmax(dim=1) == own).float(),
        "similarity": cosines[own, own],
    }
