"""Documents that are nearly the same: candidates by MinHash, each verified by its Jaccard index.

Chains of unverified candidates remove much that is no duplicate. Here a pair counts only with its
own index, and pairs are kept with it, so a higher threshold needs nothing else. Of documents
with the same text one is compared for all.
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
"""Documents of a group that are all compared with each other; of larger groups, see `_rounds`."""
_AT_ONCE = 1 << 9
"""Pairs that are verified together: 16 MiB of the longest sketches; verifying takes 200 MiB."""
_PENDING = 1 << 22
"""Candidates that are collected before they are verified: 64 MiB."""
_ROWS = 1 << 16
"""Signatures that are read together: 28 MiB."""
_UNLIKELY = 5.0
"""A pair is not looked at whose signatures are so many standard errors below the threshold: one of
3 million that are at the threshold itself."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Documents that are nearly the same."""

    ids: I64
    """Two a row, the lower first, ascending: [pairs, 2]."""
    jaccard: npt.NDArray[np.float32]
    """The index of each, [pairs]."""

    def above(self, threshold: float) -> Pairs:
        """Those with an index of at least that."""
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
    """Pairs of documents with a Jaccard index of at least the threshold.

    What hangs together by such pairs is compared once more, all with all, since the bands miss a
    few of them. Beside `memory` it takes 24 bytes a pair.

    Args:
        same: What `exact.same_texts` gives: these documents are left out.
        threshold: Jaccard index of the sets of word 5-grams.
        scratch: A folder for what does not fit in memory.
        bands: How candidates are found; None takes 95 % of those at the threshold.
        memory: Bytes to stay below while sorting.
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
    """Compares documents, and keeps the pairs that are similar.

    Args:
        corpus: The columns.
        threshold: Least Jaccard index.
    """

    def __init__(self, corpus: Measured, threshold: float) -> None:
        self._corpus, self._threshold = corpus, threshold
        error = np.sqrt(threshold * (1 - threshold) / HASHES)
        self._least_alike = HASHES * (threshold - _UNLIKELY * error)
        self._pending: list[I64] = []
        self._found: list[Pairs] = []

    def compare(self, groups: Groups) -> None:
        """Find the similar pairs within groups."""
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
        """Return all pairs so far, each once."""
        self._verify()
        self._found = [_unique(self._found)]
        return self._found[0]

    def _rounds(self, ids: I64) -> None:
        """Compare the first with all others, then the first of those not similar to it, and so on.

        Whatever is similar to a document that stays is compared with it; what goes needs no other
        pair. For m documents it takes m times as many comparisons as there are different ones.
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
        """Those that are similar: by their signatures first, then by their sketches."""
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
    """Where each pair stands, once, in ascending order of the pairs."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    ordered = pairs[order]
    new = np.ones(len(order), dtype=np.bool_)
    new[1:] = (ordered[1:] != ordered[:-1]).any(1)
    return order[new]
