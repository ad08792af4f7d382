"""Objectives on a rank: from the model's output to the loss and its measures.

A record is one sample: a row of documents that do not attend to each other. Of a preference pair
they are the two answers, the chosen one first; each includes its prompt, whose tokens have no
labels. So data order, resume, the mesh and evaluation need no notion of records, and one forward
pass covers all documents of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from trainctl.config.registry import function_of
from trainctl.config.schema import ObjectiveConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.errors import MachineError
from trainctl.options.data import SampleKind
from trainctl.options.objective import (
    ANSWERS,
    HIDDEN_STATES,
    LOGITS,
    RECORDS,
    REFERENCE,
    SCORES,
    objective_of,
)

if TYPE_CHECKING:
    from trainctl.train.parallel.tensor import Vocabulary

Measured = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""Loss of each counted token or record, and measures of the same shape by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Facts about a micro-batch's samples beside their tokens."""

    documents: torch.Tensor
    """Index of each token's document in its sample, from 0, (samples, length). Padding behind the
    documents of a record has higher indices.
    """
    targets: torch.Tensor | None = None
    """Numbers of each record, (samples, k), fp32, NaN where absent."""
    stored: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Rows of `Objective.stored` by name, (samples, ...)."""
    gradient: torch.Tensor | None = None
    """Gradient of the global batch's loss with respect to the features, in the second pass of an
    objective with two.
    """


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Log-probabilities of labels; tensors are (samples, length)."""

    log_probabilities: torch.Tensor
    """Log-probability of each next token, in nats, fp32; 0 at positions without a label."""
    is_counted: torch.Tensor
    """Whether a position has a label."""
    beside: Beside | None = None
    """None only in tests of objectives that do not look at it."""


@dataclass(frozen=True, slots=True)
class SeenLogits:
    """Logits of all positions."""

    logits: torch.Tensor
    """(samples, length, vocabulary), in the model's type; on a tensor rank, its part of the
    vocabulary.
    """
    labels: torch.Tensor
    """(samples, length); IGNORED_LABEL at positions that do not count."""
    beside: Beside
    vocabulary: Vocabulary | None = None
    """Split of the vocabulary over tensor ranks; None if it is whole."""


@dataclass(frozen=True, slots=True)
class SeenHiddenStates:
    """Last hidden states of all positions."""

    hidden: torch.Tensor
    """(samples, length, width), in the model's type."""
    is_counted: torch.Tensor
    """Whether a position has a label, (samples, length)."""
    beside: Beside


@dataclass(frozen=True, slots=True)
class SeenScores:
    """Outputs of a head `score` at all positions."""

    scores: torch.Tensor
    """(samples, length, outputs), fp32."""
    is_counted: torch.Tensor
    """Whether a position has a label, (samples, length): in `steps`, the last token of a step."""
    beside: Beside

    def at_end(self, document: int) -> torch.Tensor:
        """Return the outputs at the last token of a document of each sample, (samples, outputs)."""
        is_here = self.beside.documents == document
        last = (is_here * torch.arange(is_here.shape[1], device=is_here.device)).argmax(dim=1)
        return self.scores[torch.arange(len(last), device=last.device), last]

    def labels_in_order(self) -> torch.Tensor:
        """Return the targets of the counted positions, (samples, length); 0 elsewhere."""
        targets = self.beside.targets
        assert targets is not None
        number = (self.is_counted.cumsum(dim=1) - 1).clamp(min=0, max=targets.shape[1] - 1)
        return targets.gather(1, number).masked_fill(~self.is_counted, 0.0)


@dataclass(frozen=True, slots=True)
class SeenPairs:
    """Log-probabilities of two answers; tensors are (samples,), fp32."""

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
    def of(cls, tokens: SeenTokens) -> SeenPairs:
        """Build the pairs of samples, whose first two documents are the answers."""
        assert tokens.beside is not None
        documents, stored = tokens.beside.documents, tokens.beside.stored
        # Two masks rather than a scattered sum, which has no fixed order on a GPU.
        is_chosen = tokens.is_counted & (documents == 0)
        is_rejected = tokens.is_counted & (documents == 1)
        log_probabilities = tokens.log_probabilities
        known = stored.get(REFERENCE, log_probabilities.new_zeros(len(documents), 2))
        return cls(
            chosen=log_probabilities.masked_fill(~is_chosen, 0.0).sum(dim=1),
            rejected=log_probabilities.masked_fill(~is_rejected, 0.0).sum(dim=1),
            chosen_tokens=is_chosen.sum(dim=1).clamp(min=1).float(),
            rejected_tokens=is_rejected.sum(dim=1).clamp(min=1).float(),
            reference_chosen=known[:, 0],
            reference_rejected=known[:, 1],
            is_counted=is_chosen.any(dim=1) & is_rejected.any(dim=1),
        )


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """Features of all records of a global batch, in the order of their counters."""

    features: torch.Tensor
    """(records, ...), fp32, as `Objective.build` returns them for the samples of a micro-batch; the
    second dimension may be padded with zeros.
    """
    is_counted: torch.Tensor
    """Whether each record counts, (records,); others are padding of an evaluation."""


class ObjectiveLoss:
    """Loss function of an objective.

    Attributes:
        reads: Model output that it is called with, as `Objective.reads`.
        has_two_passes: Whether `whole` computes the loss, from the features of a first pass.
        temperature: Divisor of the logits, with which answers were sampled.
    """

    def __init__(self, section: ObjectiveConfig, vocabulary: Vocabulary | None = None) -> None:
        spec = objective_of(section)
        self.reads, self._vocabulary = spec.reads, vocabulary
        is_sampled = spec.takes is SampleKind.prompts
        self.temperature: float = section.temperature if is_sampled else 1.0  # type: ignore[attr-defined]
        self._sees_pairs, self._counts_records = spec.sees_pairs, spec.counts == RECORDS
        self._named = spec.measures_of(section)
        self._what = f"objective.kind={spec.name}"
        self._losses = partial(function_of("objective", section.kind), section)
        self.has_two_passes = spec.passes == 2
        if self.has_two_passes:
            self._whole = partial(function_of("objective", section.kind, "whole"), section)

    def __call__(
        self, output: torch.Tensor, labels: torch.Tensor, beside: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss, and each sample's measures, (samples, names), without a gradient.

        An objective with two passes has no measures here. In the first one its features are
        returned instead of a loss; in the second one, a sum with the gradient that the loss of the
        global batch has.

        Args:
            output: What the objective reads, as `trainctl.train.objectives.loss.output_of` returns
                it.
            labels: (samples, length); IGNORED_LABEL at positions that do not count.
            beside: The fields of `Beside`.

        Raises:
            TrainctlError: The function's measures differ from its spec's (exit code 4).
        """
        is_counted = labels != IGNORED_LABEL
        seen = self._seen(output, labels, Beside(**beside))
        if self.has_two_passes:
            features: torch.Tensor = self._losses(seen).float()
            gradient = beside.get("gradient")
            none = features.new_zeros(len(labels), 0)
            return features if gradient is None else (features * gradient).sum(), none
        if self._counts_records:
            is_counted = seen.is_counted if isinstance(seen, SeenPairs) else is_counted.any(dim=1)
        losses, found = self._losses(seen)
        if isinstance(seen, SeenPairs):
            found = {**found, **dict(zip(ANSWERS, (seen.chosen, seen.rejected), strict=True))}
        losses, measures = self._of_samples(losses, found, is_counted)
        return losses.sum(), measures

    def whole(
        self, features: torch.Tensor, is_counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses of all records of a global batch, (records,), and their measures.

        Args:
            features: (records, ...), in the order of the records' counters.
            is_counted: (records,); others are padding.
        """
        losses, found = self._whole(WholeBatch(features, is_counted))
        return self._of_samples(losses, found, is_counted)

    def _of_samples(
        self, losses: torch.Tensor, found: Mapping[str, torch.Tensor], is_counted: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the loss of each sample, (samples,), and its measures, (samples, names)."""
        if set(found) != set(self._named):
            raise MachineError(
                f"{self._what} measures {', '.join(found) or 'nothing'}, and its spec names "
                f"{', '.join(self._named) or 'nothing'}",
                hint="let measures name what its function gives",
            )

        def kept(values: torch.Tensor) -> torch.Tensor:
            return torch.where(is_counted, values.float(), 0.0).view(len(values), -1).sum(dim=1)

        measures = [kept(found[name].detach()) for name in self._named]
        empty = losses.new_zeros(len(losses), 0)
        return kept(losses), torch.stack(measures, dim=1) if measures else empty

    def _seen(self, output: torch.Tensor, labels: torch.Tensor, beside: Beside) -> Any:
        """Return what the objective's function is called with."""
        if self.reads == LOGITS:
            return SeenLogits(output, labels, beside, self._vocabulary)
        is_counted = labels != IGNORED_LABEL
        if self.reads == HIDDEN_STATES:
            return SeenHiddenStates(output, is_counted, beside)
        if self.reads == SCORES:
            return SeenScores(output, is_counted, beside)
        tokens = SeenTokens(output.masked_fill(~is_counted, 0.0), is_counted, beside)
        return SeenPairs.of(tokens) if self._sees_pairs else tokens


def loss_of(section: ObjectiveConfig, vocabulary: Vocabulary | None = None) -> ObjectiveLoss | None:
    """Return the loss of an objective; None for next-token prediction, the model's own."""
    return ObjectiveLoss(section, vocabulary) if objective_of(section).build else None
