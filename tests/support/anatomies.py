"""Models of transformers directories, read in the test's own process."""

from __future__ import annotations

from dataclasses import replace

from trainctl.config.model_directory import fill_from_directory
from trainctl.config.schema import ModelConfig

SMALL = [
    "model supports sdpa eager flash_attention_2",
    "model.embed_tokens.weight 512x64 embedding",
    "model.layers.{0-1}.self_attn.q_proj.weight 64x64 weight",
    "model.norm.weight 64 norm",
    "lm_head.weight 512x64 head",
    "model.layers.{0-1} block 0 attention=4x16x16",
]
"""Anatomy of a small model, for tests where the anatomy does not matter."""


def read_directory(model: ModelConfig) -> ModelConfig:
    """Return the shape and the anatomy that composing derives from `model.path`."""
    filled = fill_from_directory(model)
    if not filled.is_directory:
        return filled
    from trainctl.train.models.anatomy import anatomy

    return replace(filled, anatomy=anatomy(filled).to_table())
