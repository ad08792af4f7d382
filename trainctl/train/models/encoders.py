"""Classes of transformers for decoders and encoders, and masks that keep packed documents apart."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    masking_utils,
)
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    packed_sequence_mask_function,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.models.directory import ENCODERS
from trainctl.train.models.varlen import has_flash_attention


def is_encoder(config: PretrainedConfig) -> bool:
    """Whether the configuration is of an encoder that can be trained.

    A BERT with `is_decoder` attends to earlier tokens only, and is a causal language model.
    """
    return config.model_type in ENCODERS and not getattr(config, "is_decoder", False)


def auto_class(config: PretrainedConfig, *, has_score: bool = False) -> Any:
    """Return the class of transformers that builds and loads a model.

    Args:
        has_score: Whether its head is a `score` in place of the vocabulary's.
    """
    if has_score:
        return AutoModelForSequenceClassification
    return AutoModelForMaskedLM if is_encoder(config) else AutoModelForCausalLM


def separate_documents(model: PreTrainedModel) -> None:
    """Let a model's masks keep documents apart by the `position_ids` of its forward pass."""
    if is_encoder(model.config):
        model.base_model.register_forward_pre_hook(keep_documents_apart, with_kwargs=True)
        return
    for part in (each for each in model.modules() if isinstance(each, PreTrainedModel)):
        part.register_forward_pre_hook(_keep_positions, with_kwargs=True)
        part.register_forward_hook(_drop_positions, always_call=True)
        names = vars(sys.modules[type(part).__module__])
        for name in CAUSAL_MASKS:
            if names.get(name) is getattr(masking_utils, name):
                names[name] = _with_positions(names[name])


CAUSAL_MASKS = (
    "create_causal_mask",
    "create_chunked_causal_mask",
    "create_sliding_window_causal_mask",
)
"""Functions of transformers that find documents in `position_ids`, if they are given them."""

_BOUNDS = "cu_seq_lens_q"
"""Argument of a forward pass whose attention reads the bounds of documents."""

_running: dict[str, torch.Tensor | None] = {}
"""Positions and bounds that the running forward pass was given, or None; empty between passes."""


def _keep_positions(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    given = kwargs.get("position_ids")
    if given is not None or not _running:
        _running["position_ids"] = given
    _running[_BOUNDS] = kwargs.get(_BOUNDS) if has_flash_attention(model) else None


def _drop_positions(*_: Any) -> None:
    _running.clear()


def _with_positions(make_mask: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a mask with the positions that the running pass was given.

    Some models (gpt-oss, AFMoE, Falcon) leave them out. Others count from 0 where they are given
    none, and transformers would search these for documents: a read of the device in each pass.
    Attention that reads the bounds of documents gets no mask.
    """

    @wraps(make_mask)
    def make(*args: Any, **kwargs: Any) -> Any:
        if (
            _running.get(_BOUNDS) is not None
            and make_mask is not masking_utils.create_chunked_causal_mask
        ):
            return None
        own = kwargs.get("position_ids")
        if _running and len(args) < 5 and (own is None or _running["position_ids"] is None):
            kwargs["position_ids"] = _running["position_ids"]
        return make_mask(*args, **kwargs)

    return make


def keep_documents_apart(
    encoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the attention mask of packed documents to an encoder's arguments (a forward pre-hook).

    transformers finds the documents in `position_ids` for causal masks alone. Without positions,
    all tokens of a sample attend to each other. A flash kernel is told the documents' lengths.
    """
    model: Any = encoder
    positions = kwargs.get("position_ids")
    if positions is None or has_flash_attention(model) or kwargs.get("attention_mask") is not None:
        return args, kwargs
    how = {
        "config": model.config,
        # Only its shape, type and device are read.
        "inputs_embeds": torch.empty(
            *positions.shape, 0, dtype=model.dtype, device=positions.device
        ),
        "attention_mask": None,
        "and_mask_function": packed_sequence_mask_function((positions == 0).cumsum(dim=1)),
    }
    mask: Any = create_bidirectional_mask(**how)
    if set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"}:
        sliding = create_bidirectional_sliding_window_mask(**how)
        mask = {"full_attention": mask, "sliding_attention": sliding}
    return args, {**kwargs, "attention_mask": mask}
