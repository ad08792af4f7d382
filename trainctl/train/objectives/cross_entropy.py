"""Loss kernels that never hold all logits at once.

The logits of a long sequence and a large vocabulary, in fp32 and with their gradient, take more
memory than anything else in a step. Both kernels go from the last hidden states to the loss a few
tokens at a time.
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
    """Return a function from last hidden states to logits that runs the model's own code.

    Some architectures scale the hidden states before the head, or cap the logits behind it. So
    the code is run rather than rewritten, with a stand-in for the decoder that returns given
    hidden states.
    """
    shell = copy.copy(model)  # shares the head, with its hooks
    given = _Given()
    shell._modules = {**model._modules, model.base_model_prefix: given}

    def head(states: torch.Tensor) -> torch.Tensor:
        given.states = states
        logits: torch.Tensor = shell.forward(use_cache=False).logits
        return logits

    return head


class _Given(nn.Module):
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
        if z_loss > 0:  # found.loss is the sum of both losses, with both gradients
            return torch.stack([found.loss - found.z_loss.detach(), found.z_loss.detach()])
        loss: torch.Tensor = found
        return loss


def fuse_head(head: nn.Linear, ignored_label: int, z_loss: float) -> None:
    """Turn a model's output projection into a `LigerFusedHead`, in place.

    Args:
        ignored_label: Label of positions that do not count.
        z_loss: Weight of the squared log-normalisers, in training. With one, the head returns cross
            entropy and z loss, (2,).
    """
    # Change the class in place: the model, its hooks and its tied weight refer to this object.
    head.__class__ = LigerFusedHead
    head.ignored_label = ignored_label  # type: ignore[assignment]
    head.z_loss = z_loss  # type: ignore[assignment]
