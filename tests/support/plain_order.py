"""Sample order of a run with one source, as a reference for the sampler of several sources.

A balanced Feistel network is a permutation of [0, 4^k); walking a cycle until it re-enters [0, n)
makes it one of [0, n) (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). So the
sample at any counter is known without the ones before it, and resuming needs no fast-forward.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.uint64]

_ROUNDS = 6


def sample_indices(
    counters: npt.NDArray[np.int64], *, num_samples: int, seed: int, shuffle: bool
) -> npt.NDArray[np.int64]:
    """Return the dataset indices for global sample counters.

    Args:
        counters: Sample counters from 0, any shape; each pass over the data is a new permutation.
        num_samples: Samples in the dataset, at least 1.
        shuffle: Without it every pass keeps the dataset's own order.
    """
    epochs, positions = np.divmod(counters, num_samples)
    if not shuffle:
        return cast("npt.NDArray[np.int64]", positions)
    result = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = _permute(positions[chosen], num_samples, seed, int(epoch))
    return result


def _permute(
    positions: npt.NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> npt.NDArray[np.int64]:
    half_bits = max(1, ((num_samples - 1).bit_length() + 1) // 2)
    keys = _mix(
        np.arange(1, _ROUNDS + 1, dtype=np.uint64) ^ _mix(np.uint64(seed)) + np.uint64(epoch)
    )
    values = _feistel(positions.astype(np.uint64), half_bits, keys)
    outside = values >= num_samples
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= num_samples
    return values.astype(np.int64)


def _feistel(values: Indices, half_bits: int, keys: Indices) -> Indices:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return cast(Indices, (left << shift) | right)


def _mix(value: Indices | np.uint64) -> Indices:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014): a 64-bit bijection."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return cast(Indices, mixed ^ (mixed >> np.uint64(31)))
