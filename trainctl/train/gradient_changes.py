"""Changes of gradients other than norm clipping: centralization, clipping by value, noise."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainctl.config.schema import GradientsConfig
from trainctl.engines.fragments import ElementRange
from trainctl.engines.process import Axis
from trainctl.engines.shards import ParameterPiece, Pieces

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Multipliers of splitmix64 (Steele, Lea and Flood, 2014)."""
_MANTISSA = 1 << 24
_AT_ONCE = 1 << 22
"""Elements that noise is drawn for at a time: drawing takes some 40 bytes an element."""


def centralize(model: nn.Module, pieces: Pieces, axis: Axis | None) -> int:
    """Register hooks that subtract from a linear weight's gradient its mean over the inputs.

    Gradient centralization (arXiv:2004.01461, eq. 1). It is linear, so it is applied to the whole
    gradient of every micro-batch, before ZeRO partitions it. Embeddings, and an output projection
    tied to one, keep their gradients.

    Args:
        model: Trained model with this rank's parameters.
        axis: Tensor-parallel axis, if it splits the matrices.

    Returns:
        The number of matrices.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            piece = pieces.get(module.weight)
            if piece is not None and not piece.is_embedding:
                inputs = 0 if isinstance(module, Conv1D) else 1
                module.weight.register_hook(_centralized(inputs, piece, axis))
                count += 1
    return count


def _centralized(
    inputs: int, piece: ParameterPiece, axis: Axis | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.sum(dim=inputs, keepdim=True, dtype=torch.float32)
        if axis is not None and gradient.shape[inputs] != piece.shape[inputs]:
            dist.all_reduce(total, group=axis.group)
        mean = total / piece.shape[inputs]
        return gradient.sub(mean.to(gradient.dtype))

    return hook


def elementwise(
    config: GradientsConfig, *, seed: int, update: int, scale: float
) -> Callable[[ElementRange, torch.Tensor], None] | None:
    """Return the function that changes every gradient element at one update; None without changes.

    Args:
        config: Clipping by value, then noise.
        update: Number of the update, from 0.
        scale: Loss scale that the gradients are multiplied by.
    """
    if config.clip_value == 0 and config.noise == 0:
        return None
    deviation = math.sqrt(config.noise / (1 + update) ** config.noise_decay)

    def change(place: ElementRange, values: torch.Tensor) -> None:
        if config.clip_value > 0:
            values.clamp_(-config.clip_value * scale, config.clip_value * scale)
        for first in range(0, place.numel if config.noise > 0 else 0, _AT_ONCE):
            part = values[first : first + _AT_ONCE]
            there = replace(place, start=place.start + first, numel=part.numel())
            noise = normal(f"{seed}/{update}/{place.name}", there.indices(values.device))
            part.add_((noise * (deviation * scale)).to(values.dtype))

    return change


def normal(key: str, indices: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers that depend on `key` and an index alone, in fp32.

    Every rank that holds an element draws the same number for it. 48 bits of a hash of the index
    give two uniform numbers, and these give a normal one (Box and Muller, 1958).
    """
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "little")
    bits = _mixed(indices * _signed(_GOLDEN) + _signed(start))
    first = ((bits >> 40) & (_MANTISSA - 1)).add_(1).float() / _MANTISSA  # in (0, 1]
    second = ((bits >> 16) & (_MANTISSA - 1)).float() / _MANTISSA
    return (-2 * first.log()).sqrt_() * (2 * math.pi * second).cos_()


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Return splitmix64's finalizer of int64 values; products wrap around as unsigned ones do."""
    values = (values ^ _shifted(values, 30)) * _signed(_FIRST)
    values = (values ^ _shifted(values, 27)) * _signed(_SECOND)
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values shifted right without their sign (logical shift)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
