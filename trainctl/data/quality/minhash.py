"""MinHash: documents that share most of their word 5-grams have many numbers of a signature alike.

Broder, "On the resemblance and containment of documents" (1997); bands of rows: Leskovec, Rajaraman
and Ullman, "Mining of Massive Datasets", 3.4. A signature has `HASHES` minima, each of another
permutation of the 32-bit hashes of a document's n-grams: the share of them that two documents have
alike estimates their Jaccard index, |A and B| / |A or B|.

A *sketch* is the document's `SKETCH` smallest hashes themselves (Cohen and Kaplan, "Summarizing
data using bottom-k sketches", 2007). The Jaccard index of two of them is exact while both documents
have no more n-grams than that; of longer ones its standard error is below sqrt(J (1 - J) / SKETCH).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import DocumentBatch
from trainctl.data.quality.hashing import I64, U64, Bool, mix

U32 = npt.NDArray[np.uint32]

WORDS = 5
"""Words of an n-gram."""
HASHES = 112
"""Minima of a signature: 14 bands of 8 rows, 16 of 7, or 22 of 5."""
SKETCH = 4096
"""Most hashes of a sketch: 16 KiB, some 25,000 characters of text without repetition."""

_DRAWN = mix(np.arange(2 * HASHES, dtype=np.uint64))
_FACTORS = (_DRAWN[:HASHES] >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
_MASKS = (_DRAWN[HASHES:] >> np.uint64(32)).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Bands:
    """How signatures are compared: two documents whose rows agree in a whole band are
    candidates."""

    count: int
    rows: int
    """Numbers of a band; count x rows is at most `HASHES`."""

    def recall(self, jaccard: float) -> float:
        """Return the probability that two documents of that Jaccard index are candidates."""
        return 1 - (1 - jaccard**self.rows) ** self.count

    @classmethod
    def for_threshold(cls, threshold: float, recall: float = 0.95) -> Bands:
        """Return the longest rows that have this recall at the threshold itself: fewest
        candidates."""
        for rows in range(HASHES, 1, -1):
            bands = cls(HASHES // rows, rows)
            if bands.recall(threshold) >= recall:
                return bands
        return cls(HASHES, 1)

    def keys(self, signatures: U32) -> U64:
        """64-bit keys of each document's bands, [documents, count]; bands share no key."""
        used = signatures[:, : self.count * self.rows].astype(np.uint64)
        split = used.reshape(len(signatures), self.count, self.rows)
        keys = np.broadcast_to(np.arange(self.count, dtype=np.uint64), split.shape[:2])
        for row in range(self.rows):
            keys = mix(keys ^ split[:, :, row])
        return keys


def ngram_sets(batch: DocumentBatch) -> tuple[U32, I64]:
    """Return the distinct hashes of each document's n-grams, ascending, one document after the
    other.

    Returns:
        The hashes, [n-grams], and how many each document has, [documents].
    """
    hashes, begin = batch.ngrams(WORDS, short=True)
    owner = batch.words.document[begin].astype(np.uint64)
    keys = np.sort(owner << np.uint64(32) | hashes >> np.uint64(32))
    keys = keys[_first(keys)]
    owners = (keys >> np.uint64(32)).astype(np.int64)
    return keys.astype(np.uint32), np.bincount(owners, minlength=len(batch)).astype(np.int64)


def signatures(values: U32, counts: I64) -> U32:
    """MinHash signatures of documents, [documents, HASHES]; all ones of a document without words.

    Args:
        values: The distinct hashes of all, [n-grams].
        counts: How many each document has, [documents].
    """
    result = np.full((HASHES, len(counts)), np.uint32(0xFFFFFFFF))
    there = counts > 0
    if len(values):
        starts = (np.cumsum(counts) - counts)[there]
        hashed = np.empty_like(values)
        for number in range(HASHES):
            np.bitwise_xor(values, _MASKS[number], out=hashed)
            np.multiply(hashed, _FACTORS[number], out=hashed)
            result[number, there] = np.minimum.reduceat(hashed, starts)
    return np.ascontiguousarray(result.T)


def sketches(values: U32, counts: I64) -> tuple[U32, I64]:
    """Return the smallest `SKETCH` hashes of each document, and how many it has of them.

    Args:
        values: The distinct hashes of all, ascending within a document, [n-grams].
        counts: How many each document has, [documents].
    """
    if not len(counts) or counts.max() <= SKETCH:
        return values, counts
    place = np.arange(len(values)) - np.repeat(np.cumsum(counts) - counts, counts)
    return values[place < SKETCH], np.minimum(counts, SKETCH)


def jaccard(left: tuple[U32, I64], right: tuple[U32, I64]) -> npt.NDArray[np.float64]:
    """Jaccard indices of pairs of sketches, [pairs]; 0 where one has no words.

    Where a sketch is cut, only hashes that both would have are compared: a sample of the documents'
    n-grams that does not depend on what else they have.

    Args:
        left: Hashes of the first documents, one after the other, and their counts, [pairs].
        right: The same of the second ones.
    """
    pairs = len(left[1])
    owners = [np.repeat(np.arange(pairs), counts) for _, counts in (left, right)]
    limit = np.full(pairs, 0xFFFFFFFF, dtype=np.uint32)
    for values, counts in (left, right):
        cut = counts >= SKETCH
        limit[cut] = np.minimum(limit[cut], values[np.cumsum(counts)[cut] - 1])
    keys = [
        owner.astype(np.uint64) << np.uint64(32) | values
        for owner, (values, _) in zip(owners, (left, right), strict=True)
    ]
    both = np.concatenate(keys)
    del keys, owners
    both.sort()
    owner = (both >> np.uint64(32)).astype(np.int64)
    both, owner = _at_most(both, owner, limit)
    again = ~_first(both)
    shared = np.bincount(owner[again], minlength=pairs)
    union = np.bincount(owner, minlength=pairs) - shared
    index: npt.NDArray[np.float64] = shared / np.maximum(union, 1)
    return index


def _at_most(keys: U64, owner: I64, limit: U32) -> tuple[U64, I64]:
    kept = keys.astype(np.uint32) <= limit[owner]
    return keys[kept], owner[kept]


def _first(keys: U64) -> Bool:
    """Which of sorted keys differ from the one before."""
    first = np.ones(len(keys), dtype=np.bool_)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first
