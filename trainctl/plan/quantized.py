"""Frozen matrices in 8 or 4 bits: which layers have them, and in how many bytes. Without torch.

A matrix is one tensor of bytes, its scales before its codes, so that ZeRO and every count of bytes
see one frozen parameter under the name that it had. NF4 has a scale for each block of 64 weights
(arXiv:2305.14314), 8 bits one for each row (arXiv:2208.07339); what takes double quantization holds
the blocks' scales in 8 bits, with a scale for 256 of them and one number for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import ModelConfig
from trainctl.options.adapter import BaseWeights, LowRank
from trainctl.plan.trainable import LinearLayer, linear_layers

BLOCK = 64
"""Weights of NF4 that share a scale, in the order of the flattened matrix."""

BLOCK_OF_SCALES = 256
"""Scales in 8 bits that share one."""

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedSize:
    """How long a matrix is."""

    header: int
    """Bytes of its scales, which come first."""
    codes: int
    """Bytes of its weights."""

    @property
    def total(self) -> int:
        return self.header + self.codes


def packed_size(kind: BaseWeights, outputs: int, inputs: int) -> PackedSize:
    """Return bytes of a matrix of (outputs, inputs), whose number of weights blocks divide."""
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
    """Linear layers whose matrix is in bytes, with an adapter or without, by canonical name of the
    matrix; none where a run holds its base in the type that computes."""
    if adapter is None or not adapter.is_quantized:
        return {}
    return {f"{layer.name}.weight": layer for layer in linear_layers(model)}
