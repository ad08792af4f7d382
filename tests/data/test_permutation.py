"""Permutations without memory: bijections, their inverses, and those of runs that were begun."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainctl.data.source_sampler import derive_key, permute, unpermute

keys = st.integers(0, 2**64 - 1)


@given(st.integers(1, 600), keys)
def test_each_value_is_taken_once(size, key):
    there = permute(np.arange(size), size, key)
    assert sorted(there.tolist()) == list(range(size))
    assert (unpermute(there, size, key) == np.arange(size)).all()


@given(st.lists(st.tuples(st.integers(1, 2**50), keys, st.floats(0, 1)), min_size=1, max_size=40))
def test_vectorized_permutations_equal_single_ones(asked):
    sizes = np.array([size for size, _, _ in asked])
    numbers = np.array([key for _, key, _ in asked], dtype=np.uint64)
    values = np.array([min(size - 1, int(at * size)) for size, _, at in asked])
    together = permute(values, sizes, numbers)
    assert ((together >= 0) & (together < sizes)).all()
    alone = [int(permute([v], s, k)[0]) for v, s, k in zip(values, sizes, numbers, strict=True)]
    assert together.tolist() == alone
    assert (unpermute(together, sizes, numbers) == values).all()


def test_keys_differ_by_each_part():
    made = {
        int(derive_key(seed, a, b)) for seed in range(4) for a in range(-2, 4) for b in range(4)
    }
    assert len(made) == 4 * 6 * 4
    assert permute(np.empty((0, 3)), 5, 1).shape == (0, 3)
    assert permute(np.zeros((2, 3)), 5, 1).shape == (2, 3)
