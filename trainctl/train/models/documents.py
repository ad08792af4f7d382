"""Measurement of whether a model keeps packed documents apart, on a small model of its class.

Two rows of tokens are two documents each, which differ in the first document alone. If the hidden
states of the second document differ, its tokens see the first one: attention has no mask of
documents, or a layer carries a state from token to token.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import gcd
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
from transformers.modeling_utils import PreTrainedModel

from trainctl.engines.micro_batch import document_lengths
from trainctl.models.tensors import SCORE
from trainctl.train.models.encoders import separate_documents
from trainctl.train.models.model import materialise, parameters_on_meta
from trainctl.train.models.weights import SkipInit

LENGTHS = (9, 13)
"""Lengths of the two documents: longer than a convolution's kernel, and short for recurrences."""

TOLERANCE = 1e-4
"""Largest change of a hidden state, relative to their standard deviation, that is rounding. What a
document sees of another one changes them by more than 1e-3.
"""

LARGEST = 1 << 26
"""Number of parameters up to which a model is built."""

VOCABULARY, WIDTH, EXPERTS, CHOSEN = 128, 64, 16, 2
"""Sizes of the small model: groups of experts have two of them, as their routers need."""

DRAWN = 65_537
"""Number of random values, which weights repeat; a prime, so that no two rows of a matrix agree."""

_LAYERS = re.compile(r"(num_hidden|num_decoder|decoder|n|num)_layers?")
_HEADS = re.compile(r"(?!.*(_dim|_size)$).*(heads?|query_groups)(_per_layer)?")
_HIDDEN = re.compile(r"(?!.*per_layer).*(hidden_size|hidden_dim|n_embd|d_model|embedding_size)")
_WIDE = re.compile(r".*(intermediate|ffn|inner|dim_ff|dff).*")
_EXPERTS = re.compile(r".*(n|num)_(routed_|local_)?experts")
_CHOSEN = re.compile(r".*(experts_per_tok(en)?|moe_topk|moe_top_k|moe_k)")

FLASH = "trainctl_documents"
"""Name of an attention that takes the lengths of documents as FlashAttention does, on any device.
"""


def joined_attentions(
    built: PreTrainedModel, attentions: Sequence[str], blocks: int, *, mends: bool = True
) -> tuple[str, ...]:
    """Return the attentions with which packed documents see each other, as far as is known.

    An attention with which no small model of the class can be run counts.

    Args:
        built: The model, on any device.
        attentions: Values of `model.attention` that it supports.
        blocks: Number of its first blocks that have every kind of block.
        mends: Whether masks get the positions that its code leaves out, as in a run.
    """
    AttentionInterface.register(FLASH, _attend_within_documents)
    AttentionMaskInterface.register(FLASH, flash_attention_mask)
    apart: set[str] = set()
    is_run = False  # an attention with code of its own may fail where the first one runs
    for config in small_configs(built.config, blocks):
        with _quiet(), torch.random.fork_rng(devices=[]), suppress(Exception):
            for attention in attentions:
                torch.manual_seed(0)
                config._attn_implementation = FLASH if "flash" in attention else attention
                model = _small_model(type(built), config)
                if mends:
                    separate_documents(model)
                if is_apart(model):
                    apart.add(attention)
                is_run = True
        if is_run:
            break
    return tuple(each for each in attentions if each not in apart)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep a model's code from logging what it thinks of the small sizes."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _small_model(code: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Return a model with random weights.

    Raises:
        ValueError: It is too large to build.
    """
    with parameters_on_meta(), SkipInit():
        model = code(config)
    if sum(each.numel() for each in model.parameters()) > LARGEST:
        raise ValueError("too large")
    model.tie_weights()
    materialise(model.float(), _RandomWeights(), torch.device("cpu"))
    return model.eval()


GAIN = 0.3
"""Gain of a random matrix. Larger ones make attention choose one token, where its scores are not
divided by the root of their width; smaller ones hide what attention adds.
"""


class _RandomWeights:
    """Random weights with which all parts of a model matter. Its own may begin at zero."""

    def __init__(self) -> None:
        self._drawn = torch.randn(DRAWN)

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        count = end - start
        first = int(torch.randint(DRAWN, ()))  # equal queries and keys would see themselves alone
        values = self._drawn.repeat(count // DRAWN + 2)[first : first + count]
        return GAIN * values * shape[-1] ** -0.5 if len(shape) > 1 else 1 + values / 10

    def buffer(self, name: str) -> None:
        return None


@torch.no_grad()
def is_apart(model: PreTrainedModel) -> bool:
    """Return True if the second of two documents does not depend on the first one.

    Raises:
        ValueError: It does not depend on it without a mask either, so that nothing is shown.
    """
    length = sum(LENGTHS)
    row = torch.randint(VOCABULARY // 2, VOCABULARY, (1, length))
    other = row.clone()
    other[:, : LENGTHS[0]] = VOCABULARY * 3 // 2 - 1 - row[:, : LENGTHS[0]]
    rows = torch.cat([row, other])
    positions = torch.cat([torch.arange(each) for each in LENGTHS]).repeat(2, 1)
    inputs: dict[str, Any] = {"use_cache": False}
    if not _difference(model, rows, inputs) > 10 * TOLERANCE:
        raise ValueError("the second document never depends on the first one")
    inputs["position_ids"] = positions
    if model.config._attn_implementation == FLASH:
        inputs |= document_lengths(positions, positions.device)
    return _difference(model, rows, inputs) <= TOLERANCE


def _difference(model: PreTrainedModel, rows: torch.Tensor, inputs: Mapping[str, Any]) -> float:
    """Return the largest difference between the rows in the second document's logits, relative to
    their standard deviation.
    """
    decoder = model.base_model if hasattr(model, SCORE) else model  # a score is of the last token
    found = decoder(input_ids=rows, **inputs)[0][:, LENGTHS[0] :]
    return float((found[0] - found[1]).abs().max() / found.std())


def small_configs(config: PretrainedConfig, blocks: int) -> Iterator[PretrainedConfig]:
    """Yield configurations of small models of the same class, the smallest first.

    Some classes relate their sizes to each other: for them, widths or the number of blocks stay.
    """
    counts = (blocks, getattr(config.get_text_config(), "num_hidden_layers", blocks))
    for divisor in (1, 2, 0):
        for count in dict.fromkeys(counts):
            content = _scaled(config.to_dict(), count, divisor)
            try:
                yield type(config).from_dict(content)
            except Exception:  # the class refuses the sizes
                continue


def _scaled(content: Mapping[str, Any], blocks: int, divisor: int) -> dict[str, Any]:
    """Return a configuration with few blocks, heads, experts and rows of the vocabulary.

    Widths are divided by the same number as the heads, so that the width of a head stays: rotary
    embeddings and latent attention have sizes that follow from it.

    Args:
        divisor: Divides that number; 0 leaves widths and heads as they are.
    """
    sizes = {key: value for key, value in content.items() if type(value) is int}
    related = [key for key in sizes if _HEADS.fullmatch(key) or _HIDDEN.fullmatch(key)]
    common = gcd(*(sizes[key] for key in related if sizes[key] > 1))
    factor = 1
    if divisor and common:
        factor = common // divisor if common % divisor == 0 else common
    layers = next((sizes[key] for key in sizes if _LAYERS.fullmatch(key)), 0)
    found = dict(content)
    for key, value in content.items():
        if isinstance(value, dict):
            if all(str(each).isdigit() for each in value):  # settings by the number of a block
                found[key] = {each: of for each, of in value.items() if int(each) < blocks}
            elif "model_type" in value:
                found[key] = _scaled(value, blocks, divisor)
        elif isinstance(value, list) and layers and len(value) == layers:
            is_wide = _WIDE.fullmatch(key) and all(type(each) is int for each in value)
            found[key] = [min(each, WIDTH) if is_wide else each for each in value[:blocks]]
        elif key == "num_kv_shared_layers":  # may be more than all
            found[key] = 0
        elif key in related:
            found[key] = max(1, value // factor)
        elif key in sizes and _LAYERS.fullmatch(key):
            found[key] = min(value, blocks)
        elif key in sizes and _WIDE.fullmatch(key):
            found[key] = min(value, WIDTH)
        elif key in sizes and _EXPERTS.fullmatch(key):
            found[key] = min(value, EXPERTS)
        elif key in sizes and _CHOSEN.fullmatch(key):
            found[key] = min(value, CHOSEN)
        elif key in sizes and "vocab_size" in key:
            found[key] = min(value, VOCABULARY)
        elif key in sizes and key.endswith("token_id") and value >= VOCABULARY // 2:
            found[key] = 0
    return found


def _attend_within_documents(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention within the documents that the caller tells of; all of a row without."""
    batch, heads, length, _width = query.shape
    key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    begins = torch.zeros(batch * length, dtype=torch.long)
    if cu_seq_lens_q is not None:
        begins[cu_seq_lens_q[:-1].long()] = 1
    documents = begins.cumsum(0).view(batch, 1, length)
    mask = (documents[..., None] == documents[..., None, :]).tril()
    found = nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return found.transpose(1, 2).contiguous(), None
