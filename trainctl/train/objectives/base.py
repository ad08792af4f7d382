"""Objectives on a rank: from log-probabilities to what is differentiated, and what is recorded.

A pair of answers is one sample: two documents of a row that do not see each other, the preferred
one first, each with its prompt, of which nothing is learnt. So the order of the data, resume, the
mesh and evaluation know nothing of pairs, and one pass of the model sees both.
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
"""Losses, one for each of what is counted, and measures of the same shape by name."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """What the model says of tokens; tensors are (samples, length)."""

    log_probabilities: torch.Tensor
    """That of each next token, in nats, fp32; 0 where nothing is learnt."""
    is_counted: torch.Tensor
    """Where something is learnt."""


@dataclass(frozen=True, slots=True)
class SeenPairs:
    """What the model says of pairs of answers; tensors are (samples,), fp32."""

    chosen: torch.Tensor
    """Log-probability of the preferred answer, summed over its tokens, in nats."""
    rejected: torch.Tensor
    """That of the other one."""
    chosen_tokens: torch.Tensor
    """How many tokens it has, at least 1."""
    rejected_tokens: torch.Tensor
    reference_chosen: torch.Tensor
    """What the weights before the first step said; 0 where the objective does not need that."""
    reference_rejected: torch.Tensor
    is_counted: torch.Tensor
    """Whether a sample is a pair: not where there are none left to evaluate."""

    @classmethod
    def of(
        cls, tokens: SeenTokens, documents: torch.Tensor, reference: torch.Tensor | None = None
    ) -> SeenPairs:
        """Those of samples.

        Args:
            documents: Number of each token's document in its sample, from 0, (samples, length); the
                first two are a pair.
            reference: Log-probabilities of chosen and rejected, (samples, 2).
        """
        # Two masks, not a scattered sum: that has no fixed order on a GPU.
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
    """An objective as the loss of a model.

    Args:
        section: Its section, of an objective that has a function.
    """

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
        """Return the summed loss, and what is recorded of each sample, (samples, names), without
        gradient.

        Args:
            log_probabilities: Of the labels, in nats, fp32, (samples, length).
            labels: IGNORED_LABEL where nothing is learnt.
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
        """Summed over what a sample has of what is counted, (samples,)."""
        kept = torch.where(is_counted, values.float(), 0.0)
        return kept if kept.dim() == 1 else kept.sum(dim=1)


def loss_of(section: ObjectiveConfig) -> ObjectiveLoss | None:
    """That of a section; None where the model has it itself: the next token's."""
    return ObjectiveLoss(section) if objective_of(section).build else None
