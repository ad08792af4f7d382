"""Attention within packed documents by torch's kernel for sequences of several lengths.

Masked documents would reach `scaled_dot_product_attention` as a mask of all pairs of tokens, with
which no flash kernel works. This one gets the documents' bounds, as FlashAttention's package does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import PreTrainedModel

from trainctl.train.models.selective import kept_attention

VARLEN = "trainctl_varlen"
"""Name of this attention in a model's configuration."""

_WITHOUT = ("attention_dropout", "attn_pdrop", "attention_chunk_size")
"""Settings of a model that the kernel has no argument for."""


def varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """Return torch's kernel, which also runs on CPUs' tensors; None in a torch without it, or
    without an argument for fewer keys than queries.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    return varlen_attn if "enable_gqa" in signature(varlen_attn).parameters else None


def has_flash_attention(model: Any) -> bool:
    """Whether attention is a flash kernel, which takes document boundaries instead of a mask.

    Any version of flash attention counts: a user's own model chooses for itself.
    """
    name = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""
    return "flash" in name or name == VARLEN


def use_varlen(model: PreTrainedModel) -> bool:
    """Let a model's attention read the bounds of documents; return False if it cannot.

    A forward pass without bounds, such as that of a prompt, is that of sdpa.
    """
    kernel, config = varlen_kernel(), model.config.get_text_config()
    if kernel is None or any(getattr(config, name, None) for name in _WITHOUT):
        return False
    AttentionInterface.register(VARLEN, partial(attend_within_documents, kernel))
    AttentionMaskInterface.register(VARLEN, sdpa_mask)
    model.config._attn_implementation = VARLEN
    return True


def attend_within_documents(
    kernel: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention; the interface is transformers'.

    Args:
        query: (samples, heads, length, width); keys and values may have fewer heads.
        cu_seq_lens_q: Bounds of all documents in the flattened samples.

    Returns:
        The attention, (samples, length, heads, width of the values), and None.
    """
    if cu_seq_lens_q is None:
        settings = {"scaling": scaling, "is_causal": is_causal, **others}
        found: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **settings
        )
        return found
    samples, heads, length, width = query.shape
    own_width = value.shape[-1]
    if own_width < width:  # latent attention
        value = F.pad(value, (0, width - own_width))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach = sliding_window - 1 if sliding_window and sliding_window < length else -1
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    attended = _call_kernel(
        kernel,
        (*flat, cu_seq_lens_q),
        *flat,
        cu_seq_lens_q,
        cu_seq_lens_q,
        max_length_q,
        max_length_q,
        scale=scaling,
        window_size=(reach, 0 if causal else reach),
        enable_gqa=key.shape[1] != heads,
    )
    return attended.view(samples, length, heads, width)[..., :own_width], None


def _call_kernel(
    kernel: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    if (call := kept_attention.get(None)) is not None:
        return call(kernel, tensors, *args, **kwargs)
    return kernel(*args, **kwargs)
