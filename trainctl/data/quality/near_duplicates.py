"""Duplicates in a corpus: identical texts, near duplicates and shared passages.

Identical texts have equal 128-bit hashes; shared passages have common anchors. Near duplicates are
candidates of MinHash that are verified by their Jaccard index: chains of unverified candidates
would remove much that is no duplicate. Indices are kept, so a higher threshold needs no new search.
Of identical texts one is compared for all. The results are stored beside the columns of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.data.executors import Executor
from trainctl.data.quality.batches import I64, run_starts
from trainctl.data.quality.columns import (
    Columns,
    ColumnWriter,
    MeasuredCorpus,
    finished_key,
    key_of_corpus,
)
from trainctl.data.quality.measurement import HASHES, SKETCH, Bands, jaccard
from trainctl.data.quality.selection import Rules
from trainctl.data.quality.shuffle import (
    DuplicateSearch,
    Groups,
    Result,
    Rows,
    joined,
    read_kept,
    search_in,
    shuffle,
)


def connected_components(pairs: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """Return the ids in pairs, ascending, and the lowest id in each one's connected component.

    Every id takes the lowest label of its neighbors until nothing changes, with path halving in
    between: about log(n) passes over the pairs (Shiloach and Vishkin, 1982). `pairs` has the shape
    [pairs, 2].
    """
    ids, inside = np.unique(pairs, return_inverse=True)
    left, right = inside.reshape(-1, 2).T
    lowest = np.arange(len(ids))
    while True:
        before = lowest.copy()
        least = np.minimum(lowest[left], lowest[right])
        np.minimum.at(lowest, lowest[left], least)
        np.minimum.at(lowest, lowest[right], least)
        while True:
            halved = lowest[lowest]
            if np.array_equal(halved, lowest):
                break
            lowest = halved
        if np.array_equal(before, lowest):
            return ids, ids[lowest]


def by_group(groups: I64, members: I64) -> Groups:
    """Return the members sorted by group and ascending within each, and the size of each group."""
    order = np.lexsort((members, groups))
    _, counts = np.unique(groups, return_counts=True)
    return members[order], counts


_ALL_PAIRS = 16
"""Largest group in which all documents are compared with each other. Larger ones are compared in
rounds (`_compare_in_rounds`).
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

    def above(self, threshold: float) -> Pairs:
        """Return the pairs with an index of at least `threshold`."""
        kept = self.jaccard >= np.float32(threshold)
        return Pairs(self.ids[kept], self.jaccard[kept])


def near_pairs(search: DuplicateSearch, identical: I64, threshold: float) -> Pairs:
    """Find pairs of documents with a Jaccard index of at least the threshold.

    The documents of each connected component are compared once more, all with all, because the
    bands miss a few pairs. This takes 24 bytes a pair in this process.

    Args:
        identical: From `find_identical_texts`; copies are left out.
        threshold: Minimum Jaccard index of the sets of word 5-grams.
    """
    bands = Bands.for_threshold(threshold)
    table, copies = search.table, search.keep("copies", identical[:, 0])
    compare = partial(_compare_groups, table, threshold)
    banded = shuffle(
        search,
        "near",
        [
            (partial(_band_rows, table, copies, number, bands), part.documents * bands.count)
            for number, part in enumerate(search.corpus.parts)
        ],
        compare,
    )
    first = _merge_pairs([Pairs(each["pairs"], each["jaccard"]) for each in banded])
    if not len(first.ids):
        return first
    members, lowest = connected_components(first.ids)
    ids, counts = by_group(lowest, members)
    edges = _slices(counts)
    again: Sequence[Result | Columns] = [compare((ids, counts))] if len(edges) == 2 else []
    if not again:
        files = search.keep("members", ids), search.keep("counts", counts)
        calls = [partial(_compare_slice, files, each, compare) for each in pairwise(edges)]
        again = search.run("components", calls, len(ids) * SKETCH)
    return _merge_pairs([first, *(Pairs(each["pairs"], each["jaccard"]) for each in again)])


_TOGETHER = 1 << 14
"""Documents of components that one task compares."""


def _slices(counts: I64) -> list[int]:
    """Return edges of slices of the groups, with about `_TOGETHER` members each."""
    ends = np.cumsum(counts)
    steps = np.arange(_TOGETHER, ends[-1], _TOGETHER)
    return sorted({0, *np.searchsorted(ends, steps).tolist(), len(counts)})


def _band_rows(table: Path, copies: Path, number: int, bands: Bands) -> Rows:
    part = MeasuredCorpus.open(table).parts[number]
    left_out = part.among(read_kept(copies))
    for begin in range(0, part.documents, _ROWS):
        ids = part.ids[begin : begin + _ROWS]
        there = np.asarray(part.columns["ngrams"][begin : begin + _ROWS]) > 0
        there &= ~left_out[begin : begin + _ROWS]
        keys = bands.keys(part.columns["signature"][begin : begin + _ROWS][there])
        yield keys.ravel(), np.repeat(ids[there], bands.count)


def _compare_groups(table: Path, threshold: float, groups: Groups) -> Result:
    comparison = _Comparison(MeasuredCorpus.open(table), threshold)
    comparison.compare(groups)
    found = comparison.found()
    return {"pairs": found.ids, "jaccard": found.jaccard}


def _compare_slice(
    files: tuple[Path, Path], between: tuple[int, int], compare: Callable[[Groups], Result]
) -> Iterator[Result]:
    ids, counts = map(read_kept, files)
    begin, end = between
    first = int(counts[:begin].sum())
    own = np.array(counts[begin:end])
    yield compare((np.array(ids[first : first + own.sum()]), own))


class _Comparison:
    def __init__(self, corpus: MeasuredCorpus, threshold: float) -> None:
        self._corpus, self._threshold = corpus, threshold
        error = np.sqrt(threshold * (1 - threshold) / HASHES)
        self._least_alike = HASHES * (threshold - _UNLIKELY * error)
        self._pending: list[I64] = []
        self._found: list[Pairs] = []

    def compare(self, groups: Groups) -> None:
        ids, counts = groups
        ends = np.cumsum(counts)
        for size in np.unique(counts).tolist():
            first = (ends - counts)[counts == size]
            if size > _ALL_PAIRS:
                for begin in first.tolist():
                    self._compare_in_rounds(ids[begin : begin + size])
                continue
            left, right = np.triu_indices(size, 1)
            for some in np.array_split(first, max(1, len(first) * len(left) // _PENDING)):
                pairs = [ids[some[:, None] + side].ravel() for side in (left, right)]
                self._add(np.stack(pairs, axis=1))

    def found(self) -> Pairs:
        """Return all pairs found so far, each once."""
        self._verify()
        return _merge_pairs(self._found)

    def _compare_in_rounds(self, ids: I64) -> None:
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
            self._found.append(self._judge(candidates[_distinct_pairs(candidates)]))

    def _judge(self, pairs: I64) -> Pairs:
        """Return the pairs that are similar by their signatures and then by their sketches."""
        found = []
        for begin in range(0, len(pairs), _AT_ONCE):
            some = pairs[begin : begin + _AT_ONCE]
            alike = np.equal(*(self._corpus.rows("signature", side) for side in some.T))
            some = some[alike.sum(1) >= self._least_alike]
            index = jaccard(*(self._corpus.ragged("sketch", side) for side in some.T))
            found.append(Pairs(some, index.astype(np.float32)).above(self._threshold))
        return _merge_pairs(found)


def _merge_pairs(found: Sequence[Pairs]) -> Pairs:
    ids = np.concatenate([np.empty((0, 2), np.int64), *(each.ids for each in found)])
    index = np.concatenate([np.empty(0, np.float32), *(each.jaccard for each in found)])
    first = _distinct_pairs(ids)
    return Pairs(ids[first], index[first])


def _distinct_pairs(pairs: I64) -> I64:
    """Return the first index of each distinct pair, in ascending order of the pairs."""
    order = np.lexsort((pairs[:, 1], pairs[:, 0]))
    return order[run_starts(*pairs[order].T)]


_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Identical texts, near duplicates and shared passages; empty where the rules need none."""

    identical: I64
    pairs: Pairs
    passages: Passages


def find_duplicates(
    corpus: MeasuredCorpus, rules: Rules, folder: Path, memory: int, executor: Executor
) -> Duplicates:
    """Return the duplicates that the rules need, from `folder` if they were found before.

    Otherwise they are found and stored there. Raising `near` or changing filters needs nothing new.
    Each task sorts in `memory` bytes, with temporary files beside the folder.
    """
    wanted = (rules.near is not None, rules.substring is not None)
    key = key_of_corpus(corpus, *wanted)
    if finished_key(folder) == key:
        found = Columns.load(folder)
        if rules.near is None or found.manifest["near"] <= rules.near:
            return _from_columns(found)
    scratch = folder.with_name(f".{folder.name}.scratch")
    pairs = Pairs(_NOTHING.reshape(0, 2), np.empty(0, np.float32))
    passages = Passages(_NOTHING, _NOTHING, _NOTHING)
    with search_in(corpus, scratch, memory, executor, key=str(rules.near)) as search:
        identical = find_identical_texts(search)
        if rules.near is not None:
            pairs = near_pairs(search, identical, rules.near)
        if rules.substring is not None:
            passages = shared_passages(search, identical)
        with ColumnWriter(folder, key) as writer:
            writer.append({"same": identical, "pairs": pairs.ids, "jaccard": pairs.jaccard})
            writer.append(
                {
                    "anchor": passages.anchor,
                    "anchor.document": passages.document,
                    "anchor.word": passages.word,
                }
            )
            writer.finish(near=rules.near)
    return Duplicates(identical, pairs, passages)


def _from_columns(found: Columns) -> Duplicates:
    return Duplicates(
        found["same"],
        Pairs(found["pairs"], found["jaccard"]),
        Passages(found["anchor"], found["anchor.document"], found["anchor.word"]),
    )


def find_identical_texts(search: DuplicateSearch) -> I64:
    """Return each document with the text of an earlier one, and the first such one, [documents, 2].

    This takes 16 bytes of memory per duplicate in this process. Different texts are taken as
    identical with a probability of N^2 / 2^129 for N documents.
    """
    table = search.table
    found = shuffle(
        search,
        "identical",
        [
            (partial(_hash_rows, table, number), part.documents)
            for number, part in enumerate(search.corpus.parts)
        ],
        partial(_copies_in_groups, table),
    )
    pairs = joined(found, "copies")
    return pairs[np.argsort(pairs[:, 0])]


def _hash_rows(table: Path, number: int) -> Rows:
    part = MeasuredCorpus.open(table).parts[number]
    yield np.asarray(part.columns["hash"][:, 0]), part.ids


def _copies_in_groups(table: Path, groups: Groups) -> Result:
    """Return the copies in groups that agree in the first 64 bits of the hash."""
    ids, counts = groups
    if not len(ids):
        return {"copies": np.empty((0, 2), dtype=np.int64)}
    rest = MeasuredCorpus.open(table).rows("hash", ids)[:, 1]
    group = np.repeat(np.arange(len(counts)), counts)
    # Order by the other 64 bits of the hash too, which rarely split a group.
    order = np.lexsort((ids, rest, group))
    ids, rest, group = ids[order], rest[order], group[order]
    is_first = run_starts(group, rest)
    firsts = ids[is_first][np.cumsum(is_first) - 1]
    return {"copies": np.stack((ids, firsts), axis=1)[~is_first]}


@dataclass(frozen=True, slots=True)
class Passages:
    """Anchors that occur more than once, ordered by document and word."""

    anchor: I64
    """Number of the anchor, from 0 without gaps, [occurrences]."""
    document: I64
    word: I64
    """Word of the document at which the anchor begins, [occurrences]."""


def shared_passages(search: DuplicateSearch, identical: I64) -> Passages:
    """Return the anchors that occur more than once. Copies of a text (`identical`) are left out.

    This takes 24 bytes of memory an occurrence in this process.
    """
    parts = search.corpus.parts
    table, copies = search.table, search.keep("copies", identical[:, 0])
    counts = [len(part.columns["anchor"]) for part in parts]
    offsets = np.cumsum([0, *counts])
    found = shuffle(
        search,
        "passages",
        [
            (partial(_anchor_rows, table, copies, number, int(offsets[number])), count)
            for number, count in enumerate(counts)
        ],
        _places_of_groups,
    )
    sizes = joined(found, "size")
    place, group = joined(found, "place"), np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(place)
    place, group = place[order], group[order]
    documents, words = [_NOTHING], [_NOTHING]
    edges = np.searchsorted(place, offsets)
    for number, part in enumerate(parts):
        own = place[edges[number] : edges[number + 1]] - offsets[number]
        ends = part.columns["anchor.ends"]
        documents.append(np.searchsorted(ends, own, side="right") + part.first)
        words.append(part.columns["anchor.word"][own].astype(np.int64))
    return Passages(group, np.concatenate(documents), np.concatenate(words))


def _anchor_rows(table: Path, copies: Path, number: int, offset: int) -> Rows:
    """Yield the anchors of a part, and their places among those of all parts."""
    part = MeasuredCorpus.open(table).parts[number]
    left_out = part.among(read_kept(copies))
    kept = ~np.repeat(left_out, np.diff(np.asarray(part.columns["anchor.ends"]), prepend=0))
    places = np.flatnonzero(kept)
    yield np.asarray(part.columns["anchor"])[places], places + offset


def _places_of_groups(groups: Groups) -> Result:
    return {"place": groups[0], "size": groups[1]}
