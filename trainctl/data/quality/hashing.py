"""Hashes of array segments: words in characters, n-grams in words, lines.

The hash of a[s:e] is the polynomial sum over i of a[i] R^(i-s), modulo 2^64, mixed with the length.
R is odd and so invertible, and all segments of an array follow from one running sum (Karp and
Rabin, "Efficient randomized pattern-matching algorithms", 1987). The cost is linear in the array's
length, whatever the segments are and however they overlap.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]

_MULTIPLIER = 0x9FB21C651E98DF2B
"""R: odd; R - 1 and R + 1 are divisible by 2 and 4 only, so that neighbors in another order
differ in nearly all bits.
"""

_FOR_LENGTH = np.uint64(0x9E3779B97F4A7C15)
"""Added once per element, so that trailing zeros change the hash."""


def mix(value: U64 | np.uint64) -> U64:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood, 2014), a 64-bit bijection."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return cast(U64, mixed ^ (mixed >> np.uint64(31)))


class Segments:
    """Prefix sums of an array of integers below 2^64, for hashing any of its segments."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._sums = np.zeros(len(values) + 1, dtype=np.uint64)
        scaled = np.multiply(values, _POWERS.up_to(len(values)), dtype=np.uint64)
        np.cumsum(scaled, out=self._sums[1:])

    def hashes(self, starts: I64, ends: I64) -> U64:
        """Return 64-bit hashes of values[start:end], [segments]; equal segments have equal
        hashes.
        """
        sums = (self._sums[ends] - self._sums[starts]) * _INVERSES.up_to(len(self._sums))[starts]
        return mix(sums + (ends - starts).astype(np.uint64) * _FOR_LENGTH)


def hash_of_word(word: str) -> np.uint64:
    """Return the hash that `Segments` over code points gives for a word."""
    codes = np.array([ord(each) for each in word], dtype=np.uint32)
    return cast(np.uint64, Segments(codes).hashes(np.array([0]), np.array([len(codes)]))[0])


class _Powers:
    """Powers of a number modulo 2^64, cached and extended as needed."""

    def __init__(self, base: int) -> None:
        self._base = np.uint64(base)
        self._known = np.ones(1, dtype=np.uint64)

    def up_to(self, count: int) -> U64:
        """Return powers 0 to count - 1."""
        while len(self._known) < count:
            with np.errstate(over="ignore"):
                next_power = self._known[-1] * self._base
            self._known = np.concatenate((self._known, self._known * next_power))
        return self._known[:count]


_POWERS = _Powers(_MULTIPLIER)
_INVERSES = _Powers(pow(_MULTIPLIER, -1, 1 << 64))
