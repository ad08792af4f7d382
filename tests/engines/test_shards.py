"""Shards of parameters: what is cut is what is put together again, whatever the cuts were."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.engines.shards import Shard, read_shard, read_whole

SHAPES = [((12, 8), 0, 1), ((8, 12), 1, 1), ((24,), 0, 1), ((4, 36), 1, 3), ((36,), 0, 3)]


def cut(whole: torch.Tensor, dim: int, count: int, index: int, fused: int) -> torch.Tensor:
    """Return shard `index` of `count` by tensor operations, split per fused piece."""
    pieces = whole.chunk(fused, dim=dim)
    return torch.cat([piece.chunk(count, dim=dim)[index] for piece in pieces], dim=dim)


@pytest.mark.parametrize(("size", "dim", "fused"), SHAPES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_shard_read_from_the_whole_is_what_torch_cuts(size, dim, fused, count):
    whole = torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)
    flat = whole.flatten()
    for index in range(count):
        shard, shape = Shard.split(whole.shape, dim=dim, index=index, count=count, fused=fused)
        expected = cut(whole, dim, count, index, fused)
        assert shape == expected.shape
        numel = expected.numel()
        for start, end in [(0, numel), (1, numel - 1), (numel // 3, numel // 3 + 1)]:
            found = read_shard(lambda a, b: flat[a:b], shard, start, end)
            assert torch.equal(found, expected.flatten()[start:end])


@settings(max_examples=200)
@given(
    case=st.sampled_from(SHAPES),
    written=st.sampled_from([1, 2, 4]),
    ends=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)),
)
def test_any_range_of_the_whole_comes_back_from_its_shards(case, written, ends):
    size, dim, fused = case
    whole = torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size)
    low, high = sorted(end % (whole.numel() + 1) for end in ends)
    if low == high:
        return
    parts = {}
    for index in range(written):
        shard, _ = Shard.split(whole.shape, dim=dim, index=index, count=written, fused=fused)
        values = cut(whole, dim, written, index, fused).flatten()
        parts[shard] = lambda a, b, values=values: values[a:b]
    assert torch.equal(read_whole(parts, low, high), whole.flatten()[low:high])


def test_a_shard_that_is_missing_is_an_error():
    shard, _ = Shard.split(torch.Size((4, 4)), dim=1, index=0, count=2)
    with pytest.raises(ValueError, match="make up"):
        read_whole({shard: lambda a, b: torch.zeros(b - a)}, 0, 16)
