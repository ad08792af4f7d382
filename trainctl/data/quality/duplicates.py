"""Duplicates in a corpus: identical texts, near duplicates and shared passages.

Identical texts have equal 128-bit hashes. Candidates for near duplicates come from MinHash, and
each is verified by its Jaccard index: chains of unverified candidates would remove much that is no
duplicate. Indices are kept, so a higher threshold needs no new search. Of identical texts one is
compared for all. Shared passages are found by common anchors. The results are stored beside the
columns of the corpus.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainctl.data.quality.batches import I64, U64, run_starts
from trainctl.data.quality.columns import Columns, ColumnWriter, MeasuredCorpus, finished_key
from trainctl.data.quality.measurement import HASHES, Bands, jaccard
from trainctl.data.quality.selection import Rules

MEMORY = 1 << 30
"""Maximum bytes that each sorting step uses."""

_ROW = np.dtype([("key", "<u8"), ("id", "<i8")])
_PEAK = 4
"""Memory that sorting a bucket takes, as a multiple of the size of its rows."""

Groups = tuple[I64, I64]
"""Ids of several groups, concatenated and ascending within each, and the size of each group."""


def equal_keys(
    rows: Callable[[], Iterable[tuple[U64, I64]]], total: int, scratch: Path, memory: int = MEMORY
) -> Iterator[Groups]:
    """Yield groups of at least two ids that have the same key.

    Rows are distributed to files by the first bits of their keys, and one file is sorted at a time.

    Args:
        rows: Yields keys, evenly spread over 64 bits, and their ids.
        scratch: Folder for the files, 16 bytes a row; removed at the end.
    """
    needed = total * _ROW.itemsize * _PEAK
    bits = max(0, (needed - 1) // memory).bit_length()
    if bits == 0:
        given = list(rows())
        if given:
            keys, ids = (np.concatenate(each) for each in zip(*given, strict=True))
            yield from _equal_groups(keys, ids)
        return
    shutil.rmtree(scratch, ignore_errors=True)  # left by a killed process
    try:
        scratch.mkdir(parents=True)
        for keys, ids in rows():
            if len(keys):
                _distribute_to_buckets(keys, ids, bits, scratch)
        for path in sorted(scratch.iterdir()):
            table = np.fromfile(path, _ROW)
            path.unlink()
            yield from _equal_groups(table["key"], table["id"])
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _distribute_to_buckets(keys: U64, ids: I64, bits: int, folder: Path) -> None:
    bucket = (keys >> np.uint64(64 - bits)).astype(np.int64)
    order = np.argsort(bucket, kind="stable")
    table = np.empty(len(keys), _ROW)
    table["key"], table["id"] = keys[order], ids[order]
    found, begin = np.unique(bucket[order], return_index=True)
    for number, piece in zip(found.tolist(), np.split(table, begin[1:]), strict=True):
        with (folder / f"{number:08d}").open("ab") as stream:
            stream.write(piece.tobytes())


def _equal_groups(keys: U64, ids: I64) -> Iterator[Groups]:
    order = np.lexsort((ids, keys))
    keys, ids = keys[order], ids[order]
    starts = np.flatnonzero(run_starts(keys))
    counts = np.diff(np.append(starts, len(keys)))
    several = counts > 1
    if several.any():
        yield ids[np.repeat(several, counts)], counts[several]


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


def near_pairs(
    corpus: MeasuredCorpus,
    identical: I64,
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
        identical: From `find_identical_texts`; copies are left out.
        threshold: Minimum Jaccard index of the sets of word 5-grams.
        bands: Banding of the signatures; None finds 95 % of the pairs at the threshold.
    """
    search = _Search(corpus, threshold)
    bands = bands or Bands.for_threshold(threshold)

    def rows() -> Iterator[tuple[U64, I64]]:
        for part in corpus.parts:
            copies = part.among(identical[:, 0])
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
        members, lowest = connected_components(first.ids)
        search.compare(by_group(lowest, members))
    return search.found()


class _Search:
    """Comparison of documents, which collects the pairs that are similar."""

    def __init__(self, corpus: MeasuredCorpus, threshold: float) -> None:
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
                    self._compare_in_rounds(ids[begin : begin + size])
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
        self._found = [_merge_pairs(self._found)]
        return self._found[0]

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
            alike = self._signatures(some[:, 0]) == self._signatures(some[:, 1])
            some = some[alike.sum(1) >= self._least_alike]
            index = jaccard(
                self._corpus.ragged("sketch", some[:, 0]), self._corpus.ragged("sketch", some[:, 1])
            )
            found.append(Pairs(some, index.astype(np.float32)).above(self._threshold))
        return _merge_pairs(found)

    def _signatures(self, ids: I64) -> npt.NDArray[np.uint32]:
        return self._corpus.rows("signature", ids)


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
    corpus: MeasuredCorpus, rules: Rules, folder: Path, memory: int = MEMORY
) -> Duplicates:
    """Return the duplicates that the rules need, from `folder` if they were found before.

    Otherwise they are found and stored there. Raising `near` or changing filters needs nothing new.
    Sorting stays below `memory` bytes, with temporary files beside the folder.
    """
    wanted = (rules.near is not None, rules.substring is not None)
    key = key_of_corpus(corpus, *wanted)
    if finished_key(folder) == key:
        found = Columns.load(folder)
        if rules.near is None or found.manifest["near"] <= rules.near:
            return _from_columns(found)
    scratch = folder.with_name(f".{folder.name}.scratch")
    identical = find_identical_texts(corpus, scratch, memory)
    pairs = Pairs(_NOTHING.reshape(0, 2), np.empty(0, np.float32))
    if rules.near is not None:
        pairs = near_pairs(corpus, identical, rules.near, scratch, memory=memory)
    passages = Passages(_NOTHING, _NOTHING, _NOTHING)
    if rules.substring is not None:
        passages = shared_passages(corpus, identical, scratch, memory)
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


def key_of_corpus(corpus: MeasuredCorpus, *others: object) -> str:
    """Return a digest of everything measured, in the order of the ids, and of other values."""
    parts: Sequence[object] = [
        (part.source, part.name, part.columns.manifest["key"]) for part in corpus.parts
    ]
    return sha256(json.dumps([parts, others], sort_keys=True).encode()).hexdigest()


def _from_columns(found: Columns) -> Duplicates:
    return Duplicates(
        found["same"],
        Pairs(found["pairs"], found["jaccard"]),
        Passages(found["anchor"], found["anchor.document"], found["anchor.word"]),
    )


def find_identical_texts(corpus: MeasuredCorpus, scratch: Path, memory: int = MEMORY) -> I64:
    """Return each document with the text of an earlier one, and the first such one, [documents, 2].

    This takes 16 bytes of memory per duplicate beside `memory`, the bytes used for sorting.
    `scratch` is a folder for what does not fit. Different texts are taken as identical with a
    probability of N^2 / 2^129 for N documents.
    """

    def rows() -> Iterator[tuple[U64, I64]]:
        for part in corpus.parts:
            yield np.asarray(part.columns["hash"][:, 0]), part.ids

    found = [np.empty((0, 2), dtype=np.int64)]
    for ids, counts in equal_keys(rows, corpus.documents, scratch, memory):
        rest = corpus.rows("hash", ids)[:, 1]
        group = np.repeat(np.arange(len(counts)), counts)
        # Order by the other 64 bits of the hash too, which rarely split a group.
        order = np.lexsort((ids, rest, group))
        ids, rest, group = ids[order], rest[order], group[order]
        is_first = run_starts(group, rest)
        firsts = ids[is_first][np.cumsum(is_first) - 1]
        found.append(np.stack((ids, firsts), axis=1)[~is_first])
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 0])]


@dataclass(frozen=True, slots=True)
class Passages:
    """Anchors that occur more than once, ordered by document and word."""

    anchor: I64
    """Number of the anchor, from 0 without gaps, [occurrences]."""
    document: I64
    word: I64
    """Word of the document at which the anchor begins, [occurrences]."""


def shared_passages(
    corpus: MeasuredCorpus, identical: I64, scratch: Path, memory: int = MEMORY
) -> Passages:
    """Return the anchors that occur more than once. Copies of a text (`identical`) are left out.

    This takes 24 bytes of memory an occurrence beside `memory`, the bytes used for sorting.
    `scratch` is a folder for what does not fit.
    """
    ends = [np.asarray(part.columns["anchor.ends"]) for part in corpus.parts]
    offsets = np.cumsum([0, *(each[-1] if len(each) else 0 for each in ends)])

    def rows() -> Iterator[tuple[U64, I64]]:
        for part, end, offset in zip(corpus.parts, ends, offsets[:-1], strict=True):
            kept = ~np.repeat(part.among(identical[:, 0]), np.diff(end, prepend=0))
            places = np.flatnonzero(kept)
            yield np.asarray(part.columns["anchor"])[places], places + offset

    empty = np.empty(0, dtype=np.int64)
    places, groups = [empty], [empty]
    count = 0
    for ids, counts in equal_keys(rows, int(offsets[-1]), scratch, memory):
        places.append(ids)
        groups.append(np.repeat(np.arange(count, count + len(counts)), counts))
        count += len(counts)
    place, group = np.concatenate(places), np.concatenate(groups)
    order = np.argsort(place)
    place, group = place[order], group[order]
    documents, words = [empty], [empty]
    edges = np.searchsorted(place, offsets)
    for number, part in enumerate(corpus.parts):
        own = place[edges[number] : edges[number + 1]] - offsets[number]
        documents.append(np.searchsorted(ends[number], own, side="right") + part.first)
        words.append(part.columns["anchor.word"][own].astype(np.int64))
    return Passages(group, np.concatenate(documents), np.concatenate(words))
