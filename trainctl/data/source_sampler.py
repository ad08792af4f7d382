"""Samples of one source, draw by draw: epochs, shuffle windows, and changes of the sample length.

Draws of a source are numbered from 0 over the whole run. With n samples in its text, draw d is
position ``d % n`` of epoch ``d // n``. Each epoch is a permutation of the text's samples, with its
own key. A source with windows is shuffled in two steps: first the order of its shards, then the
samples within each window of shards. So few shards need to be local, and the next ones are known.

A *segment* is the sequence of draws of a source at one sample length. Where the length changes
within a window, a shorter length that divides the old one cuts the rest of the window into smaller
samples, the *tail* of the next segment, so that nothing is left out. Any other length leaves the
rest of the window out. The segment then goes on at the next window. No token occurs twice in an
epoch either way. Without shuffling the next segment continues at the same position.

The permutations and their inverses need no memory. A balanced Feistel network is a permutation of
[0, 4^k) (Luby and Rackoff, 1988). Walking a cycle until it re-enters [0, n) makes it a permutation
of [0, n) (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). 4^k is below 4 n, so
fewer than four walks are expected for any n above 1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from trainctl.plans.mixture import SINGLE_SOURCE, samples_in

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


SHARD_TOKENS = 1 << 26
"""Tokens of a shard, which is fetched and shuffled as one piece."""

Permutation = Callable[[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike], Integers]

_SHARDS = -1
"""Value hashed in place of a window's first sample for the permutation of the shards."""


def source_key(seed: int, name: str) -> int:
    """Return the key of all permutations of a source, from the run's seed and the source's name.

    `SINGLE_SOURCE` has the key of a run with one source, so that such a run continues unchanged
    when other sources are added.
    """
    key = splitmix64(np.uint64(seed))
    if name != SINGLE_SOURCE:
        digest = hashlib.sha256(name.encode("utf-8", errors="surrogateescape")).digest()
        key = splitmix64(key ^ np.uint64(int.from_bytes(digest[:8], "little")))
    return int(key)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedLengthSegment:
    """The draws of a source at one sample length, counted from 0 in each segment."""

    key: int
    tokens: int
    length: int
    """Tokens per sample."""
    window: int | None
    """Number of shards that are shuffled together; None shuffles the whole text."""
    shard_tokens: int
    """Tokens per shard; a multiple of every sample length if there are windows."""
    shuffle: bool = True
    """Whether epochs are permuted; otherwise they are in the order of the text."""
    first: int = 0
    """Draw number of the first sample after the tail, as if this length had been used from the
    start.
    """
    before: FixedLengthSegment | None = None
    """Previous segment, which the tail is cut from; None if there is no tail."""
    tail_from: int = 0
    """Draw of the previous segment at which the tail begins."""
    tail: int = 0

    @property
    def samples(self) -> int:
        """Number of samples in an epoch."""
        return samples_in(self.tokens, self.length)

    def at(self, draws: Integers) -> tuple[Integers, Integers]:
        """Return epoch and index of the sample of each draw; its tokens begin at index x length."""
        if self.before is None or not (inside := draws < self.tail).any():
            return epoch_and_index(draws, self.numbers, self.shuffle)
        epoch, index = np.empty_like(draws), np.empty_like(draws)
        epoch[inside], index[inside] = self._tail_samples(self.before, draws[inside])
        epoch[~inside], index[~inside] = epoch_and_index(draws[~inside], self.numbers, self.shuffle)
        return epoch, index

    def draws_of(self, token: int, draws: int) -> list[tuple[int, int]]:
        """Return epoch and draw of each of the first `draws` samples that has a token.

        This is the inverse of `at`. Each epoch occurs at most once, in the order of the draws.
        """
        found = []
        index, samples = token // self.length, self.samples
        if self.before is not None:
            found += self._draws_in_tail(self.before, token)
        if index < samples:
            last = self.first + max(0, draws - self.tail)
            for epoch in range(self.first // samples, -(-last // samples)):
                place = self._place(epoch, index)
                draw = epoch * samples + place - self.first
                found.append((epoch, draw + self.tail if draw >= 0 else -1))
        return [(epoch, draw) for epoch, draw in found if 0 <= draw < draws]

    def next_segment(self, draws: int, length: int) -> FixedLengthSegment:
        """Return the segment that follows after this many draws, at another length."""
        end, epoch, done = self._window_end(draws)
        samples = samples_in(self.tokens, length)
        place = min(done * (self._per_window(length) or samples), samples)
        rest, ratio = end - draws, self.length // length
        has_tail = rest > 0 and self.length % length == 0 and self.shuffle
        if not self.shuffle:  # in text order the unused part is behind the last sample
            epoch, place = divmod(self.first + draws, self.samples)
            place = min(-(-place * self.length // length), samples)
        return FixedLengthSegment(
            key=self.key,
            tokens=self.tokens,
            length=length,
            window=self.window,
            shard_tokens=self.shard_tokens,
            shuffle=self.shuffle,
            first=epoch * samples + place,
            before=self if has_tail else None,
            tail_from=draws,
            tail=rest * ratio if has_tail else 0,
        )

    def skipped_tokens(self, draws: int, length: int) -> int:
        """Return the tokens of the current window that a change of length leaves out."""
        end, _, _ = self._window_end(draws)
        is_cut = self.length % length == 0 or not self.shuffle
        return 0 if is_cut else (end - draws) * self.length

    def _window_end(self, draws: int) -> tuple[int, int, int]:
        """Return the end of the window at draw `draws`, its epoch, and the windows done by then.

        At a window's boundary this is the window that ends there. A text without windows is one
        window per epoch.
        """
        draw = self.first + max(0, draws - self.tail)
        epoch, place = divmod(draw, self.samples)
        each = self._per_window(self.length) or self.samples
        done = -(-place // each)
        if draws < self.tail:
            return self.tail, epoch, done
        end = min(done * each, self.samples)
        return draws + end - place, epoch, done

    def _per_window(self, length: int) -> int | None:
        return None if self.window is None else self.window * (self.shard_tokens // length)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Arguments of `epoch_and_index` for this segment; arrays for several segments."""
        each = self._per_window(self.length)
        samples = self.samples
        in_shard = self.shard_tokens // self.length if each else 0
        return self.key, self.first, self.tail, samples, each or samples, in_shard

    def _place(self, epoch: int, index: int) -> int:
        """Return the position of a sample in an epoch."""
        if not self.shuffle:
            return index
        keys, each = _epoch_keys(self.key, np.array([epoch])), self._per_window(self.length)
        if each is None:
            return int(unpermute([index], self.samples, keys)[0])
        in_shard = self.shard_tokens // self.length
        shard, within = divmod(index, in_shard)
        full = self.samples // in_shard
        mixed = (
            int(_permute_shards(np.array([shard]), full, keys, unpermute)[0]) * in_shard + within
        )
        begin = mixed // each * each
        size = min(each, self.samples - begin)
        return begin + int(unpermute([mixed - begin], size, derive_key(keys, begin))[0])

    def _tail_samples(
        self, before: FixedLengthSegment, draws: Integers
    ) -> tuple[Integers, Integers]:
        ratio = before.length // self.length
        draws = permute(draws, self.tail, self._tail_key())
        epochs, indices = before.at(self.tail_from + draws // ratio)
        return epochs, indices * ratio + draws % ratio

    def _draws_in_tail(self, before: FixedLengthSegment, token: int) -> list[tuple[int, int]]:
        ratio = before.length // self.length
        found = []
        for epoch, draw in before.draws_of(token, self.tail_from + self.tail // ratio):
            piece = (draw - self.tail_from) * ratio + token // self.length % ratio
            if piece >= 0:
                piece = int(unpermute([piece], self.tail, self._tail_key())[0])
                found.append((epoch, piece))
        return found

    def _tail_key(self) -> Words:
        return derive_key(np.uint64(self.key), self.tail_from, self.length, self.tail)


def epoch_and_index(
    draws: Integers, numbers: Sequence[npt.ArrayLike], shuffle: bool
) -> tuple[Integers, Integers]:
    """Return epoch and index of draws behind the tail of a segment, or of one segment per draw.

    `numbers` are `FixedLengthSegment.numbers`, each a scalar or an array with one value per draw.
    Without `shuffle` an epoch is in the order of the text.
    """
    key, first, tail, samples, each, in_shard = (np.asarray(number) for number in numbers)
    epochs, places = np.divmod(first + draws - tail, samples)
    if not shuffle:
        return epochs, places
    keys, has_windows = _epoch_keys(key, epochs), in_shard > 0
    if not has_windows.any():
        return epochs, permute(places, samples, keys)
    begin = places // each * each
    size = np.minimum(each, samples - begin)
    of_window = np.where(has_windows, derive_key(keys, begin), keys)
    mixed = begin + permute(places - begin, size, of_window)
    chosen = np.flatnonzero(np.broadcast_to(has_windows, mixed.shape))
    in_shard, samples = (np.broadcast_to(n, mixed.shape)[chosen] for n in (in_shard, samples))
    slots, within = np.divmod(mixed[chosen], in_shard)
    shards = _permute_shards(slots, samples // in_shard, keys[chosen], permute)
    mixed[chosen] = shards * in_shard + within
    return epochs, mixed


def _permute_shards(
    shards: Integers, full: npt.ArrayLike, keys: Words, how: Permutation
) -> Integers:
    """Permute the full shards. A shard that is not full stays the last of an epoch."""
    most = np.asarray(full)
    inside = np.minimum(shards, np.maximum(most - 1, 0))
    moved = how(inside, np.maximum(most, 1), derive_key(keys, _SHARDS))
    return np.where(shards < most, moved, shards)


def _epoch_keys(key: npt.ArrayLike, epochs: Integers) -> Words:
    with np.errstate(over="ignore"):
        return np.asarray(key, dtype=np.uint64) + epochs.astype(np.uint64)
