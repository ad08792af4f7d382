"""Loss of a language model: of its next tokens, or of another objective.

The logits of a long sequence and a large vocabulary, in fp32 and with their gradient, take more
memory than anything else in a step. Two kernels go from the last hidden states to the loss a few
tokens at a time and never hold all logits at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import CrossEntropyKind, KernelsConfig
from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.models.hf_weights import output_layer
from trainctl.options.objective import HIDDEN_STATES, LOGITS, SCORES
from trainctl.train.models.future import future_losses, hidden_states
from trainctl.train.models.model import family_of
from trainctl.train.objectives.base import ObjectiveLoss
from trainctl.train.parallel.routers import Routers
from trainctl.train.parallel.tensor import (
    Vocabulary,
    gather_logits,
    vocabulary_parallel_cross_entropy,
)


def summed_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary | None = None
) -> torch.Tensor:
    """Return the sum of the cross entropy over the positions with a label, in nats; fp32 scalar.

    Args:
        logits: (samples, length, vocabulary), any floating type; the softmax is in fp32.
        labels: (samples, length), already shifted; IGNORED_LABEL where there is none.
        vocabulary: Split of the vocabulary over tensor ranks; None if it is whole.
    """
    if vocabulary is not None:
        found = vocabulary_parallel_cross_entropy(logits, labels, vocabulary, ignored=IGNORED_LABEL)
        return found[0].sum()
    return F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


def summed_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary | None = None,
    *,
    z_loss: float,
) -> torch.Tensor:
    """Return cross entropy and z loss, each summed over the labelled positions; (2,), fp32.

    The z loss is `z_loss` times the squared log-normalisers. It keeps the logits from drifting
    (arXiv:2204.02311, section 5).
    """
    if vocabulary is not None:
        found = vocabulary_parallel_cross_entropy(logits, labels, vocabulary, ignored=IGNORED_LABEL)
        return torch.stack([found[0].sum(), z_loss * found[1].square().sum()])
    normalisers = logits.float().logsumexp(dim=-1).masked_fill(labels == IGNORED_LABEL, 0.0)
    cross_entropy = summed_cross_entropy(logits, labels)
    return torch.stack([cross_entropy, z_loss * normalisers.square().sum()])


def log_probabilities(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary | None = None
) -> torch.Tensor:
    """Return the labels' log-probabilities in nats, (samples, length), fp32; 0 without a label."""
    if vocabulary is not None:
        found = vocabulary_parallel_cross_entropy(logits, labels, vocabulary, ignored=IGNORED_LABEL)
        return -found[0]
    losses = F.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="none"
    )
    return -losses.view_as(labels)


def output_of(
    model: PreTrainedModel,
    reads: str,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    vocabulary: Vocabulary | None = None,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Return the output of a model that an objective reads.

    Args:
        reads: `Objective.reads`.
        inputs: Keyword arguments of the model's forward pass.
        temperature: Divides the logits.
    """
    if reads in (HIDDEN_STATES, SCORES):
        hidden: torch.Tensor = model.base_model(**inputs).last_hidden_state
        return output_layer(model)(hidden).float() if reads == SCORES else hidden  # type: ignore[no-any-return]
    logits: torch.Tensor = model(**inputs).logits
    logits = logits if temperature == 1 else logits.float() / temperature  # as a sampler's
    return logits if reads == LOGITS else log_probabilities(logits, labels, vocabulary)


class LossModule(nn.Module):
    """Base of the modules that the engine trains, which compute their own loss.

    Args:
        vocabulary: Split of the vocabulary over tensor ranks; None if it is whole.
        z_loss: Weight of the squared log-normalisers, in training.

    Attributes:
        last_measures: Measures of each sample of the last loss, (samples, names), without a
            gradient; None if the objective has none.
    """

    def __init__(self, vocabulary: Vocabulary | None, z_loss: float = 0.0) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._z_loss = z_loss
        self.last_measures: torch.Tensor | None = None

    def losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the summed cross entropy; in training with a z loss, both losses, (2,)."""
        if self._z_loss == 0 or not self.training:
            return summed_cross_entropy(logits, labels, self._vocabulary)
        return summed_losses(logits, labels, self._vocabulary, z_loss=self._z_loss)

    def full_vocab_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary; without a gradient if it is split."""
        return logits if self._vocabulary is None else gather_logits(logits, self._vocabulary)


class LanguageModel(LossModule):
    """A transformers model with its loss, so that both run inside the engine.

    Args:
        vocabulary: Split of the vocabulary over tensor ranks; None if it is whole.
        z_loss: Weight of the squared log-normalisers, in training.
        objective: Loss of the objective; None for next-token prediction.
        future_weight: Weight of the loss of tokens further ahead, in training; None if the model
            predicts none.

    Attributes:
        last_z_loss: The z loss within the last loss, without a gradient; None if there is none.
        last_future_loss: The weighted loss of tokens further ahead within the last loss; None if
            there is none.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        vocabulary: Vocabulary | None,
        kernels: KernelsConfig,
        z_loss: float = 0.0,
        routers: Routers | None = None,
        objective: ObjectiveLoss | None = None,
        future_weight: float | None = None,
    ) -> None:
        super().__init__(vocabulary, z_loss)
        self.model = model
        self.last_z_loss: torch.Tensor | None = None
        self.last_future_loss: torch.Tensor | None = None
        self._future_weight = future_weight
        self._kernels, self._routers, self.objective = kernels, routers, objective
        if kernels.cross_entropy is CrossEntropyKind.liger_fused:
            # Change the class in place: the model, its hooks and its tied weight refer to it.
            head = getattr(model, family_of(model).head)
            head.__class__, head.z_loss = LigerFusedHead, z_loss

    def forward(
        self,
        inputs: dict[str, Any],
        labels: torch.Tensor | None = None,
        beside: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the summed loss; without labels, the logits, (samples, length, vocabulary); in
        the first of an objective's two passes, the features.

        Args:
            beside: `MicroBatch.objective_inputs`, for an objective with a loss of its own.
        """
        self.last_z_loss = self.last_future_loss = None
        if labels is None:
            return self.full_vocab_logits(self.model(**inputs).logits)
        if self.objective is not None:
            own = self.objective
            found = output_of(
                self.model, own.reads, inputs, labels, self._vocabulary, own.temperature
            )
            loss, self.last_measures = own(found, labels, beside or {})
            return loss
        if self._future_weight is not None:
            loss, future = losses_with_future(self.model, inputs, labels)
            self.last_measures = future.detach()[None, None]
            if not self.training:
                return loss
            self.last_future_loss = self._future_weight * future.detach()
            return loss + self._future_weight * future
        if self._kernels.has_all_logits:
            losses = self.losses(self.model(**inputs).logits, labels)
        else:
            losses = self._loss_without_logits(inputs, labels)
        if losses.dim():  # cross entropy and z loss
            self.last_z_loss = losses[1].detach()
            losses = losses.sum()
        added = self._routers.added_loss(labels) if self._routers is not None else None
        return losses if added is None else losses + added

    def _loss_without_logits(self, inputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
        hidden = self.model.base_model(**inputs).last_hidden_state
        if self._kernels.cross_entropy is CrossEntropyKind.chunked:
            return chunked_cross_entropy(
                own_head(self.model),
                hidden,
                labels,
                chunk_tokens=self._kernels.chunk_tokens,
                loss=self.losses,
            )
        head = getattr(self.model, family_of(self.model).head)
        return head(hidden, labels)


def losses_with_future(
    model: PreTrainedModel, inputs: dict[str, Any], labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed cross entropies of the next tokens, and of those further ahead: the mean of
    the model's future blocks.
    """
    head = own_head(model)

    def loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return summed_cross_entropy(head(states), targets)

    hidden, beside = hidden_states(model, family_of(model), inputs)
    future = future_losses(model, inputs, labels, hidden, beside, loss)
    return loss(hidden, labels), future


Head = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def own_head(model: PreTrainedModel) -> Head:
    """Return a function from last hidden states to logits that runs the model's own code.

    Some architectures scale the hidden states before the head, or cap the logits behind it. So
    the code is run rather than rewritten, with a stand-in for the decoder that returns given
    hidden states.
    """
    shell = copy.copy(model)  # shares the head, with its hooks
    given = _GivenHiddenStates()
    shell._modules = {**model._modules, model.base_model_prefix: given}

    def head(states: torch.Tensor) -> torch.Tensor:
        given.states = states
        return shell.forward(use_cache=False).logits

    return head


class _GivenHiddenStates(nn.Module):
    """Stand-in for a decoder, which returns given hidden states."""

    states: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.states)


class _Output:
    """Decoder output with last hidden states only."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, place: int) -> torch.Tensor:
        assert place == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def chunked_cross_entropy(
    head: Head, hidden: torch.Tensor, labels: torch.Tensor, *, chunk_tokens: int, loss: Loss
) -> torch.Tensor:
    """Return the summed loss, or losses, with the logits of one chunk of tokens at a time.

    The backward pass recomputes the logits. For each chunk this costs one more product with the
    head and, if its weight is partitioned (ZeRO-3), one more gather. The gradient of the weight
    is accumulated over the chunks in the weight's own type.

    Args:
        head: Function from hidden states (1, tokens, width) to logits (1, tokens, vocabulary).
        hidden: (samples, length, width).
        labels: (samples, length), as `loss` expects them.
        chunk_tokens: Tokens of a chunk, over all samples.
        loss: Function of logits and labels, summed over the tokens; gives a scalar, or a vector of
            several losses.
    """

    def chunk_loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(head(states), targets)

    # `split` rather than slices: the gradients of the chunks are then collected in one tensor.
    chunks = zip(
        hidden.flatten(0, 1)[None].split(chunk_tokens, dim=1),
        labels.flatten()[None].split(chunk_tokens, dim=1),
        strict=True,
    )
    losses = [
        checkpoint(chunk_loss, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in chunks
    ]
    return torch.stack(losses).sum(dim=0)


class LigerFusedHead(nn.Linear):
    """Output projection that computes the summed loss by Liger's kernel if it is given labels.

    The weight is used within the module's forward pass, where ZeRO-3 gathers it. Liger computes the
    gradients already in the forward pass (arXiv:2410.10989).
    """

    z_loss: float
    """Weight of the squared log-normalisers, in training. With one, the head returns cross entropy
    and z loss, (2,).
    """

    def forward(  # type: ignore[override]
        self, input: torch.Tensor, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        if labels is None:
            return super().forward(input)
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        z_loss = self.z_loss if self.training else 0.0
        found: Any = liger_fused_linear_cross_entropy(
            input.flatten(0, 1),
            self.weight,
            labels.flatten(),
            bias=self.bias,
            ignore_index=IGNORED_LABEL,
            lse_square_scale=z_loss,
            reduction="sum",
            return_z_loss=z_loss > 0,
        )
        if z_loss > 0:  # found.loss is the sum of both losses, with both gradients
            return torch.stack([found.loss - found.z_loss.detach(), found.z_loss.detach()])
        return found
