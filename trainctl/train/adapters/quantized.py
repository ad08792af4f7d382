"""A frozen base in 8 or 4 bits: its codecs, layers that dequantize, and sources of its bytes.

A layer's `weight` is a tensor of bytes under its usual name (`trainctl.plans.trainable`), which
ZeRO-3 partitions like any frozen parameter. It is dequantized in the forward pass and again in the
backward pass, and not kept between them. Codecs convert ranges of a flattened matrix that begin and
end at block borders, so a rank quantizes only the part that it keeps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trainctl.config.extras import install_command
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import MachineError, TrainctlError
from trainctl.options.adapter import BaseWeights, LowRank, low_rank
from trainctl.plans.trainable import (
    BLOCK,
    BLOCK_OF_SCALES,
    LinearLayer,
    packed_size,
    quantized_layers,
)
from trainctl.train.adapters.layers import DoraLayer, DoraLinear, LoraLayer, LoraLinear
from trainctl.train.models.weights import WeightSource

CHUNK = 1 << 24
"""Approximate number of weights quantized at once: 64 MiB in fp32."""


class QuantizedLinear(nn.Linear):
    """Linear layer W x + b with a quantized W."""

    codec: Codec

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return W x."""
        return _Product.apply(inputs, self.weight, self.codec)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.product(input)
        return output if self.bias is None else output + self.bias


class LoraQuantized(LoraLayer, QuantizedLinear):
    """Quantized linear layer with LoRA: W x + b + s B A x."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.added(self.dropped(input))


class DoraQuantized(DoraLayer, QuantizedLinear):
    """Quantized linear layer with DoRA."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.codec.matrix(self.weight, input.dtype)
        output = self.scaled(self.product(input), input, weight)
        return output if self.bias is None else output + self.bias

    def plain(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.product(inputs)  # keeps no dequantized matrix


class _Product(torch.autograd.Function):
    """Product with a matrix that is dequantized in both passes and gets no gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, inputs: torch.Tensor, packed: torch.Tensor, codec: Codec
    ) -> torch.Tensor:
        # Save the parameter itself, which ZeRO-3 gathers anew for the backward pass.
        ctx.save_for_backward(packed)
        ctx.codec = codec
        return F.linear(inputs, codec.matrix(packed, inputs.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (packed,) = ctx.saved_tensors
        return gradient @ ctx.codec.matrix(packed, gradient.dtype), None, None


_CLASSES: dict[type, type] = {
    nn.Linear: QuantizedLinear,
    LoraLinear: LoraQuantized,
    DoraLinear: DoraQuantized,
}
"""Quantized class by the class of a layer."""


def quantize(model: nn.Module, config: RunConfig) -> None:
    """Turn the frozen matrices of a skeleton into bytes, after its adapter is attached.

    Raises:
        TrainctlError: A matrix belongs to no linear layer.
    """
    for name, codec in codecs_of(config.model, low_rank(config.adapter)).items():
        layer = name.removesuffix(".weight")
        module: Any = model.get_submodule(layer)
        if type(module) not in _CLASSES:
            raise TrainctlError(
                f"adapter.base_weights: {layer} is a {type(module).__name__}, and the matrices of "
                "linear layers alone are expanded where they are used",
                hint="adapter.base_weights=compute",
            )
        packed = torch.empty(codec.total, dtype=torch.uint8, device="meta")
        # Change the class in place: the block calls this object by its name.
        module.__class__ = _CLASSES[type(module)]
        module.codec = codec
        module.weight = nn.Parameter(packed, requires_grad=False)


class _Source:
    """Base of weight sources in which some matrices are quantized."""

    def __init__(
        self, source: WeightSource, codecs: Mapping[str, Codec], device: torch.device
    ) -> None:
        self._source, self._codecs, self._device = source, codecs, device

    def buffer(self, name: str) -> torch.Tensor | None:
        return self._source.buffer(name)

    def _encoded(
        self, name: str, codec: Codec, start: int, end: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield codes and scales of the blocks with weights [start, end), chunk by chunk."""
        shape, block = torch.Size((codec.outputs, codec.inputs)), codec.block
        step = max(CHUNK // block, 1) * block
        last = -(-end // block) * block
        for first in range(start // block * block, last, step):
            values = self._source.read(name, shape, first, min(first + step, last))
            yield codec.encode(values.to(self._device))

    def _header(self, name: str, codec: Codec) -> torch.Tensor:
        """Return the header of a matrix, for which the whole matrix is read."""
        scales = [scales for _, scales in self._encoded(name, codec, 0, codec.weights)]
        return codec.write_scales(torch.cat(scales))


class QuantizedWeights(_Source):
    """Weight source that gives the bytes of quantized matrices and all other tensors unchanged."""

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a parameter; of a quantized one, its bytes."""
        codec = self._codecs.get(name)
        if codec is None:
            return self._source.read(name, shape, start, end)
        header, parts = codec.header, []
        if start < header:
            parts.append(self._header(name, codec)[start:end])
        if end > header:
            first, last = (max(place - header, 0) for place in (start, end))
            parts.append(self._codes(name, codec, first, last))
        return torch.cat([part.cpu() for part in parts])

    def _codes(self, name: str, codec: Codec, first: int, last: int) -> torch.Tensor:
        """Return bytes [first, last) of the codes."""
        each = codec.weights_per_byte
        found = [codes for codes, _ in self._encoded(name, codec, first * each, last * each)]
        offset = first * each // codec.block * codec.block // each
        return torch.cat(found)[first - offset : last - offset]


class DequantizedWeights(_Source):
    """Weight source that gives quantized matrices as fp32 values, as the model sees them."""

    _last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        codec = self._codecs.get(name)
        if codec is None:
            return self._source.read(name, shape, start, end)
        scales, block, parts = self._scales(name, codec), codec.block, []
        first = start // block
        for codes, found in self._encoded(name, codec, start, end):
            own = scales[first : first + found.numel()]
            parts.append(codec.decode(codes, own, torch.float32).cpu())
            first += found.numel()
        offset = start // block * block
        return torch.cat(parts)[start - offset : end - offset]

    def _scales(self, name: str, codec: Codec) -> torch.Tensor:
        """Return all scales of a matrix, cached for reads of neighbouring ranges."""
        if self._last is None or self._last[0] != name:
            self._last = name, codec.read_scales(self._header(name, codec))
        return self._last[1]


def codecs_of(model: ModelConfig, adapter: LowRank | None) -> dict[str, Codec]:
    """Return the codecs of the base matrices, by name; empty if they are not quantized."""
    layers = quantized_layers(model, adapter)
    return {
        name: codec_of(adapter.base_weights, layer)
        for name, layer in layers.items()
        if adapter is not None
    }


def quantized_source(source: WeightSource, config: RunConfig, device: torch.device) -> WeightSource:
    """Return the source of a skeleton's bytes; `source` itself if nothing is quantized."""
    codecs = codecs_of(config.model, low_rank(config.adapter))
    return QuantizedWeights(source, codecs, device) if codecs else source


def dequantized_source(
    source: WeightSource, model: ModelConfig, adapter: LowRank | None
) -> WeightSource:
    """Return the base that the adapter was trained on; `source` itself if not quantized."""
    codecs = codecs_of(model, adapter)
    return DequantizedWeights(source, codecs, torch.device("cpu")) if codecs else source


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
            codes, absmax=upper[1:], code=_dynamic_map(header.device), blocksize=BLOCK_OF_SCALES
        )
        return scales + upper[0]


@cache
def _dynamic_map(device: torch.device) -> torch.Tensor:
    """Return the 256 values of bitsandbytes' dynamic 8-bit map, on a device."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


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
        raise MachineError(
            f"adapter.base_weights={kind.value} needs a package that is missing (bitsandbytes)",
            hint=install_command("bitsandbytes"),
        )
    return _CODECS[kind](kind, layer)
