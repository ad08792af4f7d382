"""Objectives on a rank: from log-probabilities to the loss and its measures.

A preference pair is one sample: a row of two documents that do not attend to each other, the chosen
answer first. Each document includes its prompt, whose tokens have no labels. So data order, resume,
the mesh and evaluation need no notion of pairs, and one forward pass covers both answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainctl.config.registry import function_of
from trainctl.config.schema import ObjectiveConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.objective import PAIRS, objective_of

Measured = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss of each counted token or pair, and measures of the same shape by name."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Model outputs for a token objective; tensors are (samples, length)."""

    log_probabilities: torch.Tensor
    """Log-probability of each next token, in nats, fp32; 0 at positions without a label."""
    is_counted: torch.Tensor
    """Whether a position has a label."""


@dataclass(frozen=True, slots=True)
class SeenPairs:
    """Model outputs for a preference objective; tensors are (samples,), fp32."""

    chosen: torch.Tensor
    """Log-probability of the chosen answer, summed over its tokens, in nats."""
    rejected: torch.Tensor
    """Log-probability of the rejected answer, summed over its tokens, in nats."""
    chosen_tokens: torch.Tensor
    """Number of tokens of the chosen answer, at least 1."""
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor
    """Log-probability of the chosen answer under the reference model, which has the weights before
    the first step; 0 if the objective needs no reference.
    """
    reference_rejected: torch.Tensor
    is_counted: torch.Tensor
    """Whether the sample is a pair; False for the padding of an evaluation's last batch."""

    @classmethod
    def of(
        cls, tokens: SeenTokens, documents: torch.Tensor, reference: torch.Tensor | None = None
    ) -> SeenPairs:
        """Build the pairs of samples.

        Args:
            documents: Index of each token's document in its sample, from 0, (samples, length); the
                first two documents are the pair.
            reference: Reference log-probabilities of chosen and rejected, (samples, 2).
        """
        # Two masks rather than a scattered sum, which has no fixed order on a GPU.
        is_chosen = tokens.is_counted & (documents == 0)
        is_rejected = tokens.is_counted & (documents == 1)
        log_probabilities = tokens.log_probabilities
        known = log_probabilities.new_zeros(len(documents), 2) if reference is None else reference
        return cls(
            chosen=log_probabilities.masked_fill(~is_chosen, 0.0).sum(dim=1),
            rejected=log_probabilities.masked_fill(~is_rejected, 0.0).sum(dim=1),
            chosen_tokens=is_chosen.sum(dim=1).clamp(min=1).float(),
            rejected_tokens=is_rejected.sum(dim=1).clamp(min=1).float(),
            reference_chosen=known[:, 0],
            reference_rejected=known[:, 1],
            is_counted=is_chosen.any(dim=1) & is_rejected.any(dim=1),
        )


class ObjectiveLoss:
    """Loss function of an objective."""

    def __init__(self, section: ObjectiveConfig) -> None:
        spec = objective_of(section)
        self._counts_pairs = spec.counts == PAIRS
        self._named = spec.measures
        self._what = f"objective.kind={spec.name}"
        function: Callable[..., Measured] = function_of("objective", section.kind)
        self._losses = partial(function, section)

    def __call__(
        self, log_probabilities: torch.Tensor, labels: torch.Tensor, beside: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, and each sample's measures, (samples, names), without a gradient.

        The measures of a pair end with the log-probabilities of its chosen and its rejected answer.

        Args:
            log_probabilities: Log-probabilities of the labels, in nats, fp32, (samples, length).
            labels: (samples, length); IGNORED_LABEL at positions that do not count.
            beside: Further arguments of `SeenPairs.of`, if the objective is one of pairs.

        Raises:
            TrainctlError: The function's measures differ from its spec's (exit code 4).
        """
        is_counted = labels != IGNORED_LABEL
        tokens = SeenTokens(log_probabilities.masked_fill(~is_counted, 0.0), is_counted)
        seen = SeenPairs.of(tokens, **beside) if self._counts_pairs else tokens
        losses, found = self._losses(seen)
        if set(found) != set(self._named):
            raise TrainctlError(
                f"{self._what} measures {', '.join(found) or 'nothing'}, and its spec names "
                f"{', '.join(self._named) or 'nothing'}",
                hint="let measures name what its function gives",
                exit_code=ExitCode.environment,
            )
        values = [found[name] for name in self._named]
        if isinstance(seen, SeenPairs):
            values += [seen.chosen, seen.rejected]
        of_samples = [self._of_samples(value.detach(), seen.is_counted) for value in values]
        total = torch.where(seen.is_counted, losses, 0.0).sum()
        if not of_samples:
            return total, labels.new_zeros((len(labels), 0), dtype=torch.float32)
        return total, torch.stack(of_samples, dim=1)

    @staticmethod
    def _of_samples(values: torch.Tensor, is_counted: torch.Tensor) -> torch.Tensor:
        """Return the sum of the counted values of each sample, (samples,)."""
        kept = torch.where(is_counted, values.float(), 0.0)
        return kept if kept.dim() == 1 else kept.sum(dim=1)


def loss_of(section: ObjectiveConfig) -> ObjectiveLoss | None:
    """Return the loss of an objective; None for next-token prediction, the model's own."""
    return ObjectiveLoss(section) if objective_of(section).build else None
