"""Objectives that are not of next tokens: heads `score`, of rewards and classes, and embeddings.

Embeddings of texts are learnt by contrast, by a loss over the global batch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from trainctl.config.schema import ObjectiveConfig
from trainctl.options.objective.classify import COUNTS, ClassifyConfig, Labelling
from trainctl.options.objective.contrastive import ContrastiveConfig, Pooling
from trainctl.options.objective.reward import RewardModelConfig
from trainctl.train.objectives.base import Measured, SeenHiddenStates, SeenScores, WholeBatch
from trainctl.train.objectives.preferences import rewards


def reward(config: RewardModelConfig, seen: SeenScores) -> Measured:
    """Return the Bradley-Terry loss of pairs, -log sigmoid(r_c - r_r - margin).

    `centering` adds its multiple of (r_c + r_r)^2 (arXiv:2312.09244, section 2).
    """
    chosen, rejected = (seen.at_end(document).squeeze(-1) for document in (0, 1))
    targets = seen.beside.targets
    margin = 0.0 if targets is None else targets[:, 0].nan_to_num(0.0)
    losses = -F.logsigmoid(chosen - rejected - margin)
    if config.centering:
        losses = losses + config.centering * (chosen + rejected).square()
    return losses, rewards(chosen, rejected)


def process_reward(config: ObjectiveConfig, seen: SeenScores) -> Measured:
    """Return the binary cross entropy of each step's label, 0 to 1, at the step's last token."""
    scores, labels = seen.scores.squeeze(-1), seen.labels_in_order()
    losses = F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return losses, {
        "accuracy": ((scores > 0) == (labels > 0.5)).float(),
        "probability": scores.sigmoid(),
        "label": labels,
    }


def classify(config: ClassifyConfig, seen: SeenScores) -> Measured:
    """Return the losses of transformers' sequence classifiers, one for each text."""
    scores, targets = seen.at_end(0), seen.beside.targets
    assert targets is not None
    if config.problem is Labelling.regression:
        return _regression(scores, targets)
    weights = scores.new_tensor(config.class_weights) if config.class_weights else None
    classes = torch.arange(config.outputs, device=scores.device)
    labels = (targets[..., None] == classes).any(dim=1)
    if config.problem is Labelling.single_label:
        losses = F.cross_entropy(
            scores,
            labels.float(),
            weight=weights,
            reduction="none",
            label_smoothing=config.label_smoothing,
        )
        predicted = scores.argmax(dim=-1, keepdim=True) == classes
    else:
        losses = F.binary_cross_entropy_with_logits(
            scores, labels.float(), pos_weight=weights, reduction="none"
        ).mean(dim=-1)
        predicted = scores > 0
    counts = dict(zip(COUNTS, (predicted & labels, predicted, labels), strict=True))
    return losses, {
        "accuracy": (predicted == labels).all(dim=-1).float(),
        **{f"{what}_{n}": counts[what][:, n].float() for what in COUNTS for n in classes.tolist()},
    }


def _regression(scores: torch.Tensor, targets: torch.Tensor) -> Measured:
    """Return the mean squared error of each text's numbers; absent numbers do not count."""
    targets = F.pad(targets, (0, scores.shape[1] - targets.shape[1]), value=math.nan)
    is_there = ~targets.isnan()
    errors = torch.where(is_there, scores - targets.nan_to_num(0.0), 0.0)
    number = is_there.sum(dim=-1).clamp(min=1)
    losses = errors.square().sum(dim=-1) / number
    return losses, {
        "mean_squared_error": losses,
        "mean_absolute_error": errors.abs().sum(dim=-1) / number,
    }


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
