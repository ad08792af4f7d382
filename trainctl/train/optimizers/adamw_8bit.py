"""AdamW with 8-bit moments (arXiv:2110.02861), in the same blocks at any ZeRO stage.

Quantization is torchao's. torchao's own optimizer counts blocks from the start of each tensor that
it is given, and leaves tensors unquantized whose size is no multiple of 256, as most of ZeRO's
pieces are. Here blocks are counted from the start of each parameter, and replicas that share a
block agree on its scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor
from torchao.optim.quant_utils import (
    create_dynamic_map,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
)

from trainctl.options.optimizer.adamw_8bit import AT_ONCE
from trainctl.train.optimizers.partitioned import AdamLike, Group, ParameterPart

BLOCK = 256
"""Elements per scale."""
SMALLEST = 4096
"""Elements of the smallest quantized parameter; smaller ones keep fp32 moments, as in torchao."""
SMALLEST_SCALE = 1e-12

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(AdamLike):
    """AdamW that keeps its moments in 8 bits, with one scale per block.

    The update uses fp32 moments, of one stretch of a parameter at a time.
    """

    def side_ranges(self, part: ParameterPart) -> dict[str, tuple[int, int, bool]]:
        if not part.is_here:
            return {}
        if not _is_quantised(part):
            return dict.fromkeys(MOMENTS, (part.start, part.end, True))
        first, last = _block_range(part.start, part.end)
        return {f"{moment}.scale": (first, last, True) for moment in MOMENTS}

    def update(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        for moment in MOMENTS:
            self.elementwise(tensor, f"{moment}.codes")  # a checkpoint expects them of every tensor
        betas, eps, step = group["betas"], group["eps"], self.state[tensor]["step"]
        corrections = [1 - beta**step for beta in betas]
        lr, decay = group["lr"], group["weight_decay"]
        shared = self._shared_scales(tensor, gradient, betas)
        for part in (stretch for whole in self.parts(tensor) for stretch in _spans(whole)):
            values, slope = part.of(weights), part.of(gradient)
            moments = [
                self._moment(tensor, part, moment, slope, beta)
                for moment, beta in zip(MOMENTS, betas, strict=True)
            ]
            root = moments[1].sqrt() / corrections[1].sqrt() + eps
            values.sub_(lr * decay * values)
            values.sub_(lr * (moments[0] / corrections[0]) / root)
            for moment, new in zip(MOMENTS, moments, strict=True):
                self._keep(tensor, part, moment, new, shared)

    def elementwise(self, tensor: Tensor, name: str) -> Tensor:
        """Return the codes of a moment, one byte per element; small parameters do not use them."""
        state = self.state[tensor]
        if name not in state:
            state[name] = torch.zeros_like(
                tensor, dtype=torch.uint8, memory_format=torch.contiguous_format
            )
        return state[name].view(-1)

    def _moment(
        self,
        tensor: Tensor,
        part: ParameterPart,
        moment: str,
        slope: Tensor,
        beta: float,
    ) -> Tensor:
        """Return a moment of the part, updated with the gradient `slope`; fp32."""
        new = slope if moment == MOMENTS[0] else slope.square()
        return self._kept(tensor, part, moment).lerp(new, 1 - beta)

    def _kept(self, tensor: Tensor, part: ParameterPart, moment: str) -> Tensor:
        if not _is_quantised(part):
            return self.side(tensor, part, moment)
        codes = part.of(self.elementwise(tensor, f"{moment}.codes"))
        table = _code_table(moment, tensor.device)
        scale = self._scale(tensor, part, moment)
        values = dequant_with_qmap(_to_block_rows(codes, part), table, scale)
        return _from_block_rows(values, part)

    def _keep(
        self,
        tensor: Tensor,
        part: ParameterPart,
        moment: str,
        values: Tensor,
        shared: dict[tuple[str, str, int], Tensor],
    ) -> None:
        if not _is_quantised(part):
            self.side(tensor, part, moment).copy_(values)
            return
        blocks = _to_block_rows(values, part)
        scale = blocks.abs().amax(dim=1)
        first, last = _block_range(part.start, part.end)
        for block in {first, last - 1}:
            if (part.name, moment, block) in shared:
                scale[block - first] = shared[part.name, moment, block]
        scale.clamp_(min=SMALLEST_SCALE)
        codes = quantize_8bit_with_qmap(blocks / scale[:, None], _code_table(moment, tensor.device))
        part.of(self.elementwise(tensor, f"{moment}.codes")).copy_(_from_block_rows(codes, part))
        self._scale(tensor, part, moment).copy_(scale)

    def _scale(self, tensor: Tensor, part: ParameterPart, moment: str) -> Tensor:
        """Return a view of the scales of a stretch's blocks."""
        whole = next(each for each in self.parts(tensor) if each.name == part.name)
        first, last = _block_range(part.start, part.end)
        before, _ = _block_range(whole.start, whole.end)
        return self.side(tensor, whole, f"{moment}.scale")[first - before : last - before]

    def _shared_scales(
        self, tensor: Tensor, gradient: Tensor, betas: Sequence[float]
    ) -> dict[tuple[str, str, int], Tensor]:
        """Return the largest moment of each block split over replicas, by all-reduce."""
        blocks = [(part, block) for part in self.parts(tensor) for block in _cut_blocks(part)]
        if not blocks:
            return {}
        largest = torch.zeros(len(blocks), len(MOMENTS), device=tensor.device)
        for row, (part, block) in enumerate(blocks):
            low, high = max(part.start, block * BLOCK), min(part.end, (block + 1) * BLOCK)
            if low >= high:
                continue
            stretch = _span(part, low, high)
            slope = stretch.of(gradient)
            for column, (moment, beta) in enumerate(zip(MOMENTS, betas, strict=True)):
                values = self._moment(tensor, stretch, moment, slope, beta)
                largest[row, column] = values.abs().max()
        self.reduce(largest, dist.ReduceOp.MAX)
        return {
            (part.name, moment, block): largest[row, column]
            for row, (part, block) in enumerate(blocks)
            for column, moment in enumerate(MOMENTS)
        }


def _is_quantised(part: ParameterPart) -> bool:
    return part.shape.numel() >= SMALLEST


def _spans(part: ParameterPart) -> Iterator[ParameterPart]:
    """Yield the part in stretches of at most `AT_ONCE` elements, cut at block borders."""
    for low in range(part.start - part.start % BLOCK, part.end, AT_ONCE):
        high = min(low + AT_ONCE, part.end)
        yield _span(part, max(low, part.start), high)


def _span(part: ParameterPart, start: int, end: int) -> ParameterPart:
    """Return the part limited to elements [start, end)."""
    ranges = list(part.ranges)
    ranges[part.index] = (start, end)
    return replace(part, ranges=tuple(ranges), offset=part.offset + start - part.start)


def _block_range(start: int, end: int) -> tuple[int, int]:
    """Return the range of blocks, [first, last), that covers a range of elements."""
    return start // BLOCK, -(-end // BLOCK)


def _cut_blocks(part: ParameterPart) -> list[int]:
    """Return the blocks of a parameter that are split over replicas; the same on all replicas."""
    if not _is_quantised(part):
        return []
    borders = {end for start, end in part.ranges if start < end < part.shape.numel()}
    return sorted({border // BLOCK for border in borders if border % BLOCK})


def _to_block_rows(values: Tensor, part: ParameterPart) -> Tensor:
    """Return the part's elements on this replica as one row per block, padded with zeros."""
    first, last = _block_range(part.start, part.end)
    if part.numel == (last - first) * BLOCK:
        return values.reshape(-1, BLOCK)
    padded = values.new_zeros((last - first) * BLOCK)
    padded[part.start - first * BLOCK : part.end - first * BLOCK] = values
    return padded.view(-1, BLOCK)


def _from_block_rows(blocks: Tensor, part: ParameterPart) -> Tensor:
    first = part.start // BLOCK
    return blocks.view(-1)[part.start - first * BLOCK : part.end - first * BLOCK]


@cache
def _code_table(moment: str, device: torch.device) -> Tensor:
    """Return the values of the 256 codes; those of the second moment are not negative."""
    return torch.tensor(create_dynamic_map(signed=moment == MOMENTS[0]), device=device)


build = AdamW8bit.of
