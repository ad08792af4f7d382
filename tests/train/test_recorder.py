"""Pieces of parameters as blocks of their matrices, against the index of each element."""

import pytest
import torch

from trainctl.engines.shards import ElementRange, Shard
from trainctl.train.callbacks.recorder import _cut_into_blocks

SHAPE = torch.Size((6, 12))
SHARDS = {
    "whole": None,
    "rows": Shard.split(SHAPE, dim=0, index=1, count=2)[0],
    "columns": Shard.split(SHAPE, dim=1, index=2, count=3)[0],
    "rows of each third": Shard.split(SHAPE, dim=0, index=1, count=2, fused=3)[0],
    "columns of each third": Shard.split(SHAPE, dim=1, index=1, count=2, fused=3)[0],
}


@pytest.mark.parametrize("ends", [(0, 0), (5, 3), (1, 16), (14, 0)])
@pytest.mark.parametrize("name", SHARDS)
def test_blocks_have_every_element_at_its_place(name: str, ends: tuple[int, int]) -> None:
    shard = SHARDS[name]
    size = SHAPE.numel() if shard is None else SHAPE.numel() * shard.width // shard.row
    place = ElementRange("w", shard, ends[0], size - sum(ends))
    values = torch.arange(1.0, place.numel + 1)
    expected, found = torch.zeros(SHAPE.numel()), torch.zeros(SHAPE)
    expected[place.indices(values.device)] = values
    for row, column, block in _cut_into_blocks(place, SHAPE[1], values):
        found[row : row + len(block), column : column + block.shape[1]] += block
    assert found.flatten().tolist() == expected.tolist()
