"""Optional implementations of the same computation: Liger kernels, tiles, fp8, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.extras import install_command
from trainctl.config.schema import CompileKind, KernelsConfig, PrecisionConfig
from trainctl.errors import MachineError, TrainctlError
from trainctl.options.precision import is_emulated
from trainctl.options.precision.fp8 import Fp8Config
from trainctl.plans.shapes import FEED_FORWARD
from trainctl.train.adapters.layers import LoraLayer
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute import Recompute
from trainctl.train.models.selective import compiled_selection


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
    pass. A block that keeps its products is compiled with its checkpoint, whose graph tells
    operations apart.
    """
    layers = blocks(model)
    for layer in layers:
        if layer.gradient_checkpointing:
            # Set by `recompute.wrap_blocks`.
            recompute: Recompute = layer._gradient_checkpointing_func
            is_whole = recompute.contexts is noop_context_fn
            call = partial(_compile_call, keeps=not is_whole)
            layer._gradient_checkpointing_func = (
                replace(recompute, inner=call) if is_whole else replace(recompute, outer=call)
            )
        else:
            layer.compile(dynamic=False)
    return len(layers)


def _compile_call(forward: Callable[..., Any], *, keeps: bool) -> Callable[..., Any]:
    """Return a block's call, bound by `functools.partial`, with its function compiled."""
    assert isinstance(forward, partial)
    compiled = _compile_function(forward.func, keeps=keeps)
    return partial(compiled, *forward.args, **forward.keywords)


@cache
def _compile_function(function: Callable[..., Any], *, keeps: bool) -> Callable[..., Any]:
    if not keeps:
        return torch.compile(function, dynamic=False)

    def with_checkpoint(*args: Any, **keywords: Any) -> Any:
        return checkpoint(
            function, *args, use_reentrant=False, context_fn=compiled_selection, **keywords
        )

    return torch.compile(with_checkpoint, dynamic=False)


def _use_liger(model: PreTrainedModel) -> None:
    """Replace norms, rotary embedding and SwiGLU by Liger kernels; the loss is chosen elsewhere."""
    from liger_kernel.transformers import monkey_patch

    patch = getattr(monkey_patch, f"apply_liger_kernel_to_{model.config.model_type}")
    patch(cross_entropy=False, fused_linear_cross_entropy=False, model=model)


def tile_feed_forward(model: nn.Module, tiles: int) -> int:
    """Let the feed-forward layer of every block work in tiles; return the number of these layers.

    Args:
        tiles: Number of tiles per micro-batch, the same on every rank: where weights are
            partitioned (ZeRO-3), each tile gathers them.

    Raises:
        TrainctlError: A block has no feed-forward layer that is a module of its own.
    """
    layers = blocks(model)
    for layer in layers:
        named = dict(layer.named_children())
        found = [named[name] for name in FEED_FORWARD if name in named]
        if len(found) != 1:
            raise TrainctlError(
                f"kernels.mlp_tiles={tiles}, but {type(layer).__name__} has no feed-forward layer "
                "that is a module of its own",
                hint="kernels.mlp_tiles=1",
            )
        # On the instance: the module's hooks, which gather and reduce, run once around all tiles.
        (module,) = found
        module.forward = _tile_forward(module, module.forward, tiles)
    return len(layers)


def _tile_forward(module: nn.Module, forward: Callable[..., Any], tiles: int) -> Callable[..., Any]:
    drops = any(_has_dropout(part) for part in module.modules())

    def in_tiles(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Run `forward` on tiles. Every argument, and the result, has one row per token."""
        if hidden.shape[:-1].numel() < tiles:  # such as the prompt of a sample
            return forward(hidden, *others)
        run = forward
        if torch.is_grad_enabled():
            run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=drops)
        cut = (_split_into_tiles(tensor, tiles) for tensor in (hidden, *others))
        results = [run(*tile) for tile in zip(*cut, strict=True)]
        return torch.cat(results, dim=1).view(*hidden.shape[:-1], -1)

    return in_tiles


def _has_dropout(part: nn.Module) -> bool:
    """Return True if the module has dropout; an adapter may have its own."""
    share = part.p if isinstance(part, nn.Dropout) else 0.0
    return max(share, part.lora_dropout if isinstance(part, LoraLayer) else 0.0) > 0


def _split_into_tiles(tensor: torch.Tensor, tiles: int) -> tuple[torch.Tensor, ...]:
    """Return the tiles, each (1, tokens of a tile, width).

    Uses `split` rather than slices, so that the gradients are collected in one tensor.
    """
    tokens = tensor.flatten(0, -2)[None]
    each, more = divmod(tokens.shape[1], tiles)
    return tokens.split([each + (number < more) for number in range(tiles)], dim=1)


def convert_to_fp8(model: PreTrainedModel, precision: PrecisionConfig) -> int:
    """Convert the linear layers of the decoder blocks to fp8 products; return the number converted.

    Inputs, weights and gradients are rounded with one scale per tensor, or per row, computed on use
    (torchao's dynamic scaling, arXiv:2209.05433). Weights stay in bf16 under their names, so
    ZeRO, checkpoints and exports see no difference. Embeddings, norms and the output projection
    are left alone: the output projection decides the loss.

    Raises:
        TrainctlError: torchao is missing, or no layer can be converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise MachineError(
            f"precision.compute=fp8 needs the package torchao ({error})",
            hint=f"{install_command('torchao')}, or precision=bf16",
        ) from None
    assert isinstance(precision, Fp8Config)
    recipe = Float8LinearConfig.from_recipe_name(precision.fp8_scales.value)
    config = replace(recipe, emulate=is_emulated(precision))
    layers = blocks(model)
    for layer in layers:
        convert_to_float8_training(layer, config=config)
    converted = sum(isinstance(module, Float8Linear) for module in model.modules())
    if converted == 0:
        raise TrainctlError(
            f"precision.compute=fp8, but none of the {len(layers)} blocks of "
            f"{type(model).__name__} has a linear layer",
            hint="precision=bf16",
        )
    return converted
