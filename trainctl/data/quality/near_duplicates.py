"""Near duplicates: candidates by MinHash, each verified by its Jaccard index.

Chains of unverified candidates would remove much that is no duplicate, so a pair counts only by its
own index. Indices are kept, so a higher threshold needs no new search. Of identical texts one is
compared for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.corpus import Measured
from trainctl.data.quality.groups import MEMORY, Groups, by_group, components, equal_keys
from trainctl.data.quality.hashing import I64, U64
from trainctl.data.quality.minhash import HASHES, Bands, jaccard

_ALL_PAIRS = 16
"""Largest group in which all documents are compared with each other; see `_rounds` for larger
ones.
"""
_AT_ONCE = 1 << 9
"""Pairs verified together: 16 MiB of sketches at most; verifying takes 200 MiB."""
_PENDING = 1 << 22
"""Candidates collected before they are verified: 64 MiB."""
_ROWS = 1 << 16
"""Signatures read together: 28 MiB."""
_UNLIKELY = 5.0
"""Pairs whose signatures are this many standard errors below the threshold are not verified.
This misses one in 3 million pairs that are exactly at the threshold.
"""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of near duplicates."""

    ids: I64
    """Two ids a row, the lower first; rows ascend: [pairs, 2]."""
    jaccard: npt.NDArray[np.float32]
    """Jaccard index of each pair, [pairs]."""

    def above(self, threshold: float) -> Pairs:
        """Return the pairs with an index of at least `threshold`."""
        kept = self.jaccard >= np.float32(threshold)
        return Pairs(self.ids[kept], self.jaccard[kept])


def near_pairs(
    corpus: Measured,
    same: I64,
    threshold: float,
    scratch: Path,
    *,
    bands: Bands | None = None,
    memory: int = MEMORY,
) -> Pairs:
    """Find pairs of documents with a Jaccard index of at least the threshold.

    The documents of each connected component are compared once more, all with all, because the
    bands miss a few pairs. This takes 24 bytes a pair beside `memory`.

    Args:
        same: Identical texts, from `exact_duplicates.find_identical_texts`; copies are left out.
        threshold: Minimum Jaccard index of the sets of word 5-grams.
        scratch: Folder for what does not fit in memory.
        bands: Banding of the signatures; None finds 95 % of the pairs at the threshold.
        memory: Maximum bytes for sorting.
    """
    search = _Search(corpus, threshold)
    bands = bands or Bands.for_threshold(threshold)

    def rows() -> Iterator[tuple[U64, I64]]:
        for part in corpus.parts:
            copies = part.among(same[:, 0])
            for begin in range(0, part.columns.documents, _ROWS):
                ids = part.ids[begin : begin + _ROWS]
                there = np.asarray(part.columns["ngrams"][begin : begin + _ROWS]) > 0
                there &= ~copies[begin : begin + _ROWS]
                keys = bands.keys(part.columns["signature"][begin : begin + _ROWS][there])
                yield keys.ravel(), np.repeat(ids[there], bands.count)

    for groups in equal_keys(rows, corpus.documents * bands.count, scratch, memory):
        search.compare(groups)
    first = search.found()
    if len(first.ids):
        members, lowest = components(first.ids)
        search.compare(by_group(lowest, members))
    return search.found()


class _Search:
    """Comparison of documents, which collects the pairs that are similar."""

    def __init__(self, corpus: Measured, threshold: float) -> None:
        self._corpus, self._threshold = corpus, threshold
        error = np.sqrt(threshold * (1 - threshold) / HASHES)
        self._least_alike = HASHES * (threshold - _UNLIKELY * error)
        self._pending: list[I64] = []
        self._found: list[Pairs] = []

    def compare(self, groups: Groups) -> None:
        """Find the similar pairs within each group."""
        ids, counts = groups
        ends = np.cumsum(counts)
        for size in np.unique(counts).tolist():
            first = (ends - counts)[counts == size]
            if size > _ALL_PAIRS:
                for begin in first.tolist():
                    self._rounds(ids[begin : begin + size])
                continue
            left, right = np.triu_indices(size, 1)
            for some in np.array_split(first, max(1, len(first) * len(left) // _PENDING)):
                self._add(
                    np.stack(
                        (
                            ids[some[:, None] + left].ravel(),
                            ids[some[:, None] + right].ravel(),
                        ),
                        axis=1,
                    )
                )

    def found(self) -> Pairs:
        """Return all pairs found so far, each once."""
        self._verify()
        self._found = [_unique(self._found)]
        return self._found[0]

    def _rounds(self, ids: I64) -> None:
        """Compare the first with all others, then the first of those not similar to it, and so on.

        Whatever is similar to a document that stays is compared with it. A document that goes needs
        no other pair. The number of comparisons is the group's size times the number of rounds.
        """
        while len(ids) > 1:
            pairs = np.stack((np.full(len(ids) - 1, ids[0]), ids[1:]), axis=1)
            similar = self._judge(pairs)
            self._found.append(similar)
            ids = ids[1:][~np.isin(ids[1:], similar.ids[:, 1])]

    def _add(self, pairs: I64) -> None:
        self._pending.append(pairs)
        if sum(map(len, self._pending)) >= _PENDING:
            self._verify()

    def _verify(self) -> None:
        if self._pending:
            candidates = np.concatenate(self._pending)
            self._pending = []
            self._found.append(self._judge(candidates[_firsts(candidates)]))

    def _judge(self, pairs: I64) -> Pairs:
        """Return the pairs that are similar by their signatures and then by their sketches."""
        found = []
        for begin in range(0, len(pairs), _AT_ONCE):
            some = pairs[begin : begin + _AT_ONCE]
            alike = self._signatures(some[:, 0]) == self._signatures(some[:, 1])
            some = some[alike.sum(1) >= self._least_alike]
            index = jaccard(
                self._corpus.ragged("sketch", some[:, 0]), self._corpus.ragged("sketch", some[:, 1])
            )
            found.append(Pairs(some, index.astype(np.float32)).above(self._threshold))
        return _unique(found)

    def _signatures(self, ids: I64) -> npt.NDArray[np.uint32]:
        return self._corpus.rows("signature", ids)


def _unique(found: Sequence[Pairs]) -> Pairs:
    ids = np.concatenate([np.empty((0, 2), np.int64), *(each.ids for each in found)])
    index = np.concatenate([np.empty(0, np.float32), *(each.jaccard for each in found)])
    first = _firsts(ids)
    return Pairs(ids[first], index[first])


def _firsts(pairs: I64) -> I64:
    """Return the first index of each distinct pair, in ascending order of the pairs."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    return order[new]
