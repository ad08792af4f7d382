"""The loss without all of its logits at once.

The logits of a long sequence and a large vocabulary, in fp32 and with their gradient, take more
memory than anything else in a step. Both ways below go from the last hidden states to the loss a
few tokens at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import PreTrainedModel

Head = Callable[[torch.Tensor], torch.Tensor]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def own_head(model: PreTrainedModel) -> Head:
    """What a model's own code does between its last hidden states and its logits.

    That is a product, with a scale before it or a cap behind it in some architectures: so it is not
    written again, but run, on hidden states that are given to it in place of the decoder's.
    """
    shell = copy.copy(model)  # the same head, with all that hooks do around it
    given = _Given()
    shell._modules = {**model._modules, model.base_model_prefix: given}

    def head(states: torch.Tensor) -> torch.Tensor:
        given.states = states
        logits: torch.Tensor = shell.forward(use_cache=False).logits
        return logits

    return head


class _Given(nn.Module):
    """In the place of a decoder: what it would have computed."""

    states: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.states)


class _Output:
    """A decoder's, with nothing but its last hidden states."""

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

    They are computed again in the backward pass: one more product with the head, and where its
    weight is partitioned one more gathering of it, for each chunk. A weight's gradient is summed
    over the chunks in the weight's own format.

    Args:
        head: From hidden states (1, tokens, width) to logits (1, tokens, vocabulary).
        labels: (samples, length), as `loss` wants them.
        chunk_tokens: Tokens of a chunk, over all samples.
        loss: Of logits and labels, summed over the tokens; a scalar, or a vector of several.
    """

    def chunk_loss(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss(head(states), targets)

    # Split, not sliced: the gradients of the chunks then meet in one tensor, not in one for each.
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
    """An output projection that, given labels, computes the summed loss by Liger's kernel.

    The weight is used within the module's forward pass: ZeRO-3 gathers it there. Liger computes the
    gradients in the forward pass already (arXiv:2410.10989).
    """

    ignored_label: int
    z_loss: float

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
            ignore_index=self.ignored_label,
            lse_square_scale=z_loss,
            reduction="sum",
            return_z_loss=z_loss > 0,
        )
        if z_loss > 0:  # its loss is the sum of both, and has the gradient of both
            return torch.stack([found.loss - found.z_loss.detach(), found.z_loss.detach()])
        loss: torch.Tensor = found
        return loss


def fuse_head(head: nn.Linear, ignored_label: int, z_loss: float) -> None:
    """Let a model's own head compute the loss of labels other than `ignored_label`.

    Args:
        ignored_label: Label of a position that does not count.
        z_loss: Weight of the squared log-normalisers, when training; with one it gives two losses.
    """
    # The same object, since the model, its hooks and its tied weight know it.
    head.__class__ = LigerFusedHead
    head.ignored_label = ignored_label  # type: ignore[assignment]
    head.z_loss = z_loss  # type: ignore[assignment]
