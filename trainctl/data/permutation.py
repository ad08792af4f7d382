"""Permutations of [0, n) that need no memory, and their inverses.

A balanced Feistel network is a permutation of [0, 4^k) (Luby and Rackoff, 1988). Walking a cycle
until it re-enters [0, n) makes it a permutation of [0, n) (Black and Rogaway, "Ciphers with
arbitrary finite domains", 2002). 4^k is below 4 n, so fewer than four walks are expected for any n
above 1.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

ROUNDS = 6

MAX_SIZE = 1 << 53
"""Maximum size of a permutation: a float represents every integer up to it."""


def permute(values: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike) -> Integers:
    """Apply a keyed permutation of [0, size) to values of any shape.

    `size` (from 1 to `MAX_SIZE`) and `key` (64 bits) are scalars, or have one entry per value. Each
    key has its own permutation.
    """
    return _cycle_walk(values, size, key, backward=False)


def unpermute(values: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike) -> Integers:
    """Apply the inverse of `permute`."""
    return _cycle_walk(values, size, key, backward=True)


def splitmix64(value: npt.ArrayLike) -> Words:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014), a 64-bit bijection."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return cast(Words, mixed ^ (mixed >> np.uint64(31)))


def derive_key(key: npt.ArrayLike, *parts: npt.ArrayLike) -> Words:
    """Derive a key from another key and numbers. Changing any of them gives another key."""
    made = np.asarray(key, dtype=np.uint64)
    for part in parts:
        made = splitmix64(made ^ splitmix64(np.asarray(part, dtype=np.int64).astype(np.uint64)))
    return made


def unit_interval(words: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Map 64-bit numbers to [0, 1)."""
    return (np.asarray(words, dtype=np.uint64) >> np.uint64(11)) / (1 << 53)


def _cycle_walk(
    values: npt.ArrayLike, size: npt.ArrayLike, key: npt.ArrayLike, *, backward: bool
) -> Integers:
    start = np.asarray(values, dtype=np.int64)
    if start.size == 0:
        return start
    flat = start.reshape(-1).astype(np.uint64)
    sizes, keys = _one_or_each(size, start), _one_or_each(key, start)
    halves = _half_bits(sizes)
    todo = np.ones(flat.shape, dtype=np.bool_)
    while todo.any():
        walked = _feistel(flat[todo], _select(halves, todo), _select(keys, todo), backward=backward)
        flat[todo] = walked
        todo[todo] = np.asarray(walked >= _select(sizes, todo))
    return flat.astype(np.int64).reshape(start.shape)


def _feistel(values: Words, half_bits: Words, key: Words, *, backward: bool) -> Words:
    """Apply the network once. Backward, the rounds are reversed and the halves exchanged."""
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left: Words = values >> half_bits
    right: Words = values & mask
    numbers = range(1, ROUNDS + 1)
    for number in reversed(numbers) if backward else numbers:
        word = splitmix64(np.uint64(number) ^ key)
        if backward:
            left, right = right ^ (splitmix64(left ^ word) & mask), left
        else:
            left, right = right, left ^ (splitmix64(right ^ word) & mask)
    return cast(Words, (left << half_bits) | right)


def _half_bits(sizes: Words) -> Words:
    """Return half the bits of the smallest 4^k that holds [0, size), at least 1."""
    bits = np.frexp((sizes - np.uint64(1)).astype(np.float64))[1]
    return cast(Words, np.maximum(1, (bits + 1) // 2).astype(np.uint64))


def _one_or_each(value: npt.ArrayLike, like: Integers) -> Words:
    """Return a scalar if the number is the same for all (much faster); else one per value."""
    array: Words = np.asarray(value).astype(np.uint64)
    if array.ndim == 0:
        return array
    flat = np.broadcast_to(array, like.shape).reshape(-1)
    return np.asarray(flat[0]) if (flat == flat[0]).all() else flat


def _select(numbers: Words, chosen: npt.NDArray[np.bool_]) -> Words:
    return numbers if numbers.ndim == 0 else numbers[chosen]
