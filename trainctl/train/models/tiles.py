"""Feed-forward layers a part of the tokens at a time (TiledMLP of ALST, arXiv:2506.13996).

A feed-forward layer knows nothing of a token's neighbours. So it may go over a long sequence in
tiles: what is inside the layer, three to five times as wide as the hidden states, then exists for
one tile alone, in the forward pass and, computed again, in the backward pass.
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
from trainctl.train.adapters.layers import Adapted
from trainctl.train.models.model import blocks


def tile_feed_forward(model: nn.Module, tiles: int) -> int:
    """Let the feed-forward layer of every block work in tiles; how many do.

    Args:
        model: Or what a pipeline stage has of it.
        tiles: Of all tokens of a micro-batch, the same number on every rank: where weights are
            partitioned, each tile gathers them.

    Raises:
        TrainctlError: A block has no feed-forward layer of its own.
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
        # On the object: hooks of the module, which gather and reduce, stay around all tiles.
        (module,) = found
        module.forward = _tiled(module, module.forward, tiles)
    return len(layers)


def _tiled(module: nn.Module, forward: Callable[..., Any], tiles: int) -> Callable[..., Any]:
    drops = any(_drops(part) for part in module.modules())

    def in_tiles(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Return one tensor for each token in, and one out."""
        if hidden.shape[:-1].numel() < tiles:  # such as a prompt that is sampled from
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
    """Whether it zeroes some of its inputs: an adapter may, too."""
    share = part.p if isinstance(part, nn.Dropout) else 0.0
    return max(share, part.lora_dropout if isinstance(part, Adapted) else 0.0) > 0


def _cut(tensor: torch.Tensor, tiles: int) -> tuple[torch.Tensor, ...]:
    """(1, tokens of a tile, width) each. Split, not sliced: the gradients meet in one tensor."""
    tokens = tensor.flatten(0, -2)[None]
    each, more = divmod(tokens.shape[1], tiles)
    return tokens.split([each + (number < more) for number in range(tiles)], dim=1)
