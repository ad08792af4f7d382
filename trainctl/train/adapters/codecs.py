"""Quantized matrices by bitsandbytes: a header with scales, then a code for each weight.

Codecs convert ranges of a flattened matrix that begin and end at block borders, so a rank that
keeps a part of a matrix reads and quantizes only that part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec

import torch

from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import BaseWeights
from trainctl.plan.quantized import BLOCK, BLOCK_OF_SCALES, packed_size
from trainctl.plan.trainable import LinearLayer


class Codec(ABC):
    """Quantizer of one matrix.

    Attributes:
        outputs: Rows of the matrix.
        inputs: Columns of the matrix.
        header: Size of the header, in bytes.
        total: Size of header and codes, in bytes.
        weights_per_byte: Weights in one byte of codes.
    """

    block: int
    """Weights that share a scale."""
    weights_per_byte = 1

    def __init__(self, kind: BaseWeights, layer: LinearLayer) -> None:
        size = packed_size(kind, layer.outputs, layer.inputs)
        self.outputs, self.inputs = layer.outputs, layer.inputs
        self.header, self.total = size.header, size.total

    @property
    def weights(self) -> int:
        return self.outputs * self.inputs

    @abstractmethod
    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of whole blocks, as bytes, and each block's scale in fp32."""

    @abstractmethod
    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of whole blocks of codes, flat."""

    def write_scales(self, scales: torch.Tensor) -> torch.Tensor:
        """Return the header of a matrix from all of its scales."""
        return scales.contiguous().view(torch.uint8)

    def read_scales(self, header: torch.Tensor) -> torch.Tensor:
        """Return the scales in a header."""
        # A slice of ZeRO's gathered buffer may be unaligned.
        return header.clone().view(torch.float32)

    def matrix(self, packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a new dequantized matrix, (outputs, inputs)."""
        scales = self.read_scales(packed[: self.header])
        return self.decode(packed[self.header :], scales, dtype).view(self.outputs, self.inputs)


class Int8(Codec):
    """int8 with one scale per row, by which the row's largest weight becomes 127."""

    def __init__(self, kind: BaseWeights, layer: LinearLayer) -> None:
        super().__init__(kind, layer)
        self.block = layer.inputs

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from bitsandbytes.functional import int8_vectorwise_quant

        codes, scales, _ = int8_vectorwise_quant(values.view(-1, self.inputs).half())
        return codes.view(torch.uint8).view(-1), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = codes.view(torch.int8).view(-1, self.inputs).to(dtype)
        return rows.mul_(scales[:, None] * (1.0 / 127.0)).view(-1)


class Nf4(Codec):
    """NF4: 16 quantiles of a normal distribution, with a scale for each block of 64 weights."""

    block = BLOCK
    weights_per_byte = 2

    def encode(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from bitsandbytes.functional import quantize_4bit

        codes, state = quantize_4bit(values, blocksize=BLOCK, quant_type="nf4")
        return codes.view(-1), state.absmax

    def decode(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        shape = torch.Size((scales.numel(), BLOCK))  # bitsandbytes' AVX-512 ends blocks with rows
        state = QuantState(scales, shape=shape, blocksize=BLOCK, quant_type="nf4", dtype=dtype)
        return dequantize_4bit(codes.view(-1, 1), state).view(-1)


class Nf4Double(Nf4):
    """NF4 with double quantization: the block scales are kept in 8 bits around their mean."""

    def write_scales(self, scales: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import quantize_blockwise

        mean = scales.mean()
        codes, state = quantize_blockwise(scales - mean, blocksize=BLOCK_OF_SCALES)
        parts = (mean[None], state.absmax, codes)
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts])

    def read_scales(self, header: torch.Tensor) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_blockwise

        codes = header[header.numel() - self.weights // BLOCK :]
        upper = header[: header.numel() - codes.numel()].clone().view(torch.float32)
        scales: torch.Tensor = dequantize_blockwise(
            codes, absmax=upper[1:], code=_map_of(header.device), blocksize=BLOCK_OF_SCALES
        )
        return scales + upper[0]


_maps: dict[torch.device, torch.Tensor] = {}


def _map_of(device: torch.device) -> torch.Tensor:
    """Return the 256 values of bitsandbytes' dynamic 8-bit map, on a device."""
    if device not in _maps:
        from bitsandbytes.functional import create_dynamic_map

        _maps[device] = create_dynamic_map().to(device)
    return _maps[device]


_CODECS: dict[BaseWeights, type[Codec]] = {
    BaseWeights.int8: Int8,
    BaseWeights.nf4: Nf4,
    BaseWeights.nf4_double: Nf4Double,
}


def codec_of(kind: BaseWeights, layer: LinearLayer) -> Codec:
    """Return the codec of a layer's matrix.

    Raises:
        TrainctlError: bitsandbytes is not installed (exit code 4).
    """
    if find_spec("bitsandbytes") is None:
        raise TrainctlError(
            f"adapter.base_weights={kind.value} needs a package that is missing (bitsandbytes)",
            hint="pip install 'trainctl[qlora]'",
            exit_code=ExitCode.environment,
        )
    return _CODECS[kind](kind, layer)
