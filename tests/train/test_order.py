"""The sample order is a permutation, pure, and in constant memory."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from plain_order import sample_indices


@given(st.integers(1, 500), st.integers(0, 2**40), st.integers(0, 5))
def test_each_epoch_visits_every_sample_once(num_samples, seed, epoch):
    counters = np.arange(epoch * num_samples, (epoch + 1) * num_samples)
    indices = sample_indices(counters, num_samples=num_samples, seed=seed, shuffle=True)
    assert sorted(indices.tolist()) == list(range(num_samples))


@given(st.integers(1, 10**12), st.integers(0, 2**40), st.lists(st.integers(0, 10**14), min_size=1))
def test_a_counter_alone_decides(num_samples, seed, counters):
    together = sample_indices(
        np.array(counters, dtype=np.int64), num_samples=num_samples, seed=seed, shuffle=True
    )
    for counter, index in zip(counters, together.tolist(), strict=True):
        alone = sample_indices(
            np.array([counter]), num_samples=num_samples, seed=seed, shuffle=True
        )
        assert alone.tolist() == [index]
        assert 0 <= index < num_samples


def test_epochs_and_seeds_differ_and_shuffling_moves():
    n = 1000

    def order(seed, epoch):
        counters = np.arange(epoch * n, (epoch + 1) * n)
        return sample_indices(counters, num_samples=n, seed=seed, shuffle=True)

    first = order(1, 0)
    assert (first == order(1, 0)).all()
    assert (first == order(1, 1)).mean() < 0.02
    assert (first == order(2, 0)).mean() < 0.02
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 0.15


def test_without_shuffle_the_order_is_kept_over_epochs():
    indices = sample_indices(np.arange(7), num_samples=3, seed=5, shuffle=False)
    assert indices.tolist() == [0, 1, 2, 0, 1, 2, 0]
