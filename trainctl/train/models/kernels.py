"""Optional implementations of the same computation: Liger kernels, tiles and compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import CompileKind, KernelsConfig
from trainctl.train.models.model import blocks
from trainctl.train.models.tiles import tile_feed_forward


def apply_kernels(model: PreTrainedModel, config: KernelsConfig) -> None:
    """Apply the configured kernels to a model whose blocks are already wrapped for recomputation.

    The loss kernel is not among them (`train.objectives.loss`), nor is DeepCompile, which
    belongs to the engine.
    """
    if config.liger:
        _use_liger(model)
    if config.mlp_tiles > 1:
        tile_feed_forward(model, config.mlp_tiles)
    if config.compile is CompileKind.blocks:
        compile_blocks(model)


def compile_blocks(model: nn.Module) -> int:
    """Compile each decoder block, once per kind; return the number of blocks.

    A recomputed block is compiled inside its checkpoint, so that its recomputation is one compiled
    pass.
    """
    layers = blocks(model)
    for layer in layers:
        if layer.gradient_checkpointing:
            # Set by `recompute.wrap_blocks`.
            recompute = layer._gradient_checkpointing_func
            layer._gradient_checkpointing_func = replace(recompute, inner=_compiled)
        else:
            layer.compile(dynamic=False)
    return len(layers)


def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a block's call, bound by `functools.partial`, with its function compiled."""
    assert isinstance(forward, partial)
    return partial(_compiled_function(forward.func), *forward.args, **forward.keywords)


@cache
def _compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _use_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding and SwiGLU by Liger kernels; the loss is chosen elsewhere."""
    from liger_kernel.transformers import monkey_patch

    patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(cross_entropy=False, fused_linear_cross_entropy=False, model=model)
