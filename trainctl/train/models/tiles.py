"""Feed-forward layers computed in tiles of tokens (TiledMLP of ALST, arXiv:2506.13996).

A feed-forward layer treats each token alone, so it may process a long sequence in tiles. The
intermediate activations, three to five times as wide as the hidden states, then exist for one tile
at a time, in the forward pass and, recomputed, in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainctl.errors import TrainctlError
from trainctl.plan.shapes import FEED_FORWARD
from trainctl.train.adapters.layers import LoraLayer
from trainctl.train.models.model import blocks


def tile_feed_forward(model: nn.Module, tiles: int) -> int:
    """Let the feed-forward layer of every block work in tiles; return the number of these layers.

    Args:
        model: The model, or the part of it on a pipeline stage.
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
        module.forward = _tiled(module, module.forward, tiles)
    return len(layers)


def _tiled(module: nn.Module, forward: Callable[..., Any], tiles: int) -> Callable[..., Any]:
    drops = any(_drops(part) for part in module.modules())

    def in_tiles(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Run `forward` on tiles. Every argument, and the result, has one row per token."""
        if hidden.shape[:-1].numel() < tiles:  # such as the prompt of a sample
            whole: torch.Tensor = forward(hidden, *others)
            return whole
        run = forward
        if torch.is_grad_enabled():
            run = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=drops)
        cut = (_cut(tensor, tiles) for tensor in (hidden, *others))
        results = [run(*tile) for tile in zip(*cut, strict=True)]
        return torch.cat(results, dim=1).view(*hidden.shape[:-1], -1)

    return in_tiles


def _drops(part: nn.Module) -> bool:
    """Return True if the module has dropout; an adapter may have its own."""
    share = part.p if isinstance(part, nn.Dropout) else 0.0
    return max(share, part.lora_dropout if isinstance(part, LoraLayer) else 0.0) > 0


def _cut(tensor: torch.Tensor, tiles: int) -> tuple[torch.Tensor, ...]:
    """Return the tiles, each (1, tokens of a tile, width).

    Uses `split` rather than slices, so that the gradients are collected in one tensor.
    """
    tokens = tensor.flatten(0, -2)[None]
    each, more = divmod(tokens.shape[1], tiles)
    return tokens.split([each + (number < more) for number in range(tiles)], dim=1)
