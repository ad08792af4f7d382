"""Blocks behind the last one that each predict a token further ahead (arXiv:2412.19437, 2.2).

Block k takes the hidden states of the one before it and the embeddings of the tokens k further, and
predicts the tokens k + 1 further with the model's own output projection. It is transformers'
`MtpLayer`, with a decoder block and norms of the model's classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import MtpLayer
from transformers.modeling_utils import PreTrainedModel

from trainctl.engines.micro_batch import IGNORED_LABEL
from trainctl.models.tensors import FUTURE
from trainctl.options.model import Family


def add_future_blocks(model: PreTrainedModel, spec: Family, count: int) -> None:
    """Add `count` blocks to a skeleton, under the name `FUTURE`."""
    decoder = getattr(model, spec.decoder)
    last, norm = getattr(decoder, spec.blocks)[-1], type(getattr(decoder, spec.final_norm))
    index = model.config.num_hidden_layers - 1  # of the block whose mask they share
    made = [MtpLayer(model.config, type(last), norm, index) for _ in range(count)]
    setattr(model, FUTURE, nn.ModuleList(made))


def hidden_states(
    model: PreTrainedModel, spec: Family, inputs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the last hidden states, and what the last block was given beside its input: mask,
    positions, rotary embeddings.
    """
    beside: dict[str, Any] = {}

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        beside.update(kwargs)

    decoder = getattr(model, spec.decoder)
    handle = getattr(decoder, spec.blocks)[-1].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        hidden: torch.Tensor = decoder(**inputs).last_hidden_state
    finally:
        handle.remove()
    beside.pop("hidden_states", None)
    return hidden, beside


def future_losses(
    model: PreTrainedModel,
    inputs: dict[str, Any],
    labels: torch.Tensor,
    hidden: torch.Tensor,
    beside: dict[str, Any],
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Return the mean over the blocks of their summed losses.

    A position counts for block k if it and the k positions behind it have labels: then all tokens
    between are of one text that is learnt.

    Args:
        labels: (samples, length), already shifted by one.
        hidden: Last hidden states of the model, behind its final norm.
        beside: Further arguments of a block, from `hidden_states`.
        loss: Function of hidden states and labels, summed over the labels.
    """
    embedding, ids = model.get_input_embeddings(), inputs["input_ids"]
    total, targets, blocks = hidden.new_zeros(()).float(), labels, getattr(model, FUTURE)
    for number, block in enumerate(blocks, start=1):
        further = F.pad(labels[:, number:], (0, number), value=IGNORED_LABEL)
        targets = further.masked_fill(targets == IGNORED_LABEL, IGNORED_LABEL)
        embedded = embedding(F.pad(ids[:, number:], (0, number)))
        hidden = block(embedded, hidden, **beside)
        total = total + loss(hidden, targets)
    return total / len(blocks)
