"""Duplicates in a corpus: identical texts, near duplicates and shared passages.

Identical texts have equal 128-bit hashes; shared passages have common anchors. The results are
stored beside the columns of the corpus.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from trainctl.data.executors import Executor
from trainctl.data.quality.batches import I64, run_starts
from trainctl.data.quality.columns import (
    Columns,
    ColumnWriter,
    MeasuredCorpus,
    finished_key,
    key_of_corpus,
)
from trainctl.data.quality.near_duplicates import Pairs, near_pairs
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
