"""Frozen matrices in 8 or 4 bits: the layers that have them, and their sizes in bytes. No torch.

A matrix is one tensor of bytes, its scales before its codes, so that ZeRO and every count of bytes
see one frozen parameter under its usual name. NF4 has a scale for each block of 64 weights
(arXiv:2305.14314); 8 bits has one for each row (arXiv:2208.07339). Double quantization keeps the
blocks' scales in 8 bits, with one scale for 256 of them and one number for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ModelConfig
from trainctl.options.adapter import BaseWeights, LowRank
from trainctl.plan.trainable import LinearLayer, linear_layers

BLOCK = 64
"""NF4 weights that share a scale, in the order of the flattened matrix."""

BLOCK_OF_SCALES = 256
"""Number of 8-bit scales that share a second-level scale (double quantization)."""

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Size of a quantized matrix."""

    header: int
    """Bytes of the scales, which come first."""
    codes: int
    """Bytes of the quantized weights."""

    @property
    def total(self) -> int:
        return self.header + self.codes


def packed_size(kind: BaseWeights, outputs: int, inputs: int) -> PackedSize:
    """Return the size of a quantized (outputs, inputs) matrix that divides into whole blocks."""
    weights = outputs * inputs
    if kind is BaseWeights.int8:
        return PackedSize(SCALE_BYTES * outputs, weights)
    blocks = weights // BLOCK
    if kind is BaseWeights.nf4:
        return PackedSize(SCALE_BYTES * blocks, weights // 2)
    assert kind is BaseWeights.nf4_double
    upper = -(-blocks // BLOCK_OF_SCALES)
    return PackedSize(SCALE_BYTES * (1 + upper) + blocks, weights // 2)


def quantized_layers(model: ModelConfig, adapter: LowRank | None) -> dict[str, LinearLayer]:
    """Return the linear layers whose matrix is quantized, with an adapter or without, by canonical
    name of the matrix; empty if the run keeps its base weights in the compute type.
    """
    if adapter is None or not adapter.is_quantized:
        return {}
    return {f"{layer.name}.weight": layer for layer in linear_layers(model)}
