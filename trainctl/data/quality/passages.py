"""Passages of many words that documents share, by the anchors that they have in common."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainctl.data.quality.corpus import Measured
from trainctl.data.quality.groups import MEMORY, equal_keys
from trainctl.data.quality.hashing import I64, U64


@dataclass(frozen=True, slots=True)
class Passages:
    """Anchors that occur more than once, in order of their documents and words."""

    anchor: I64
    """Which one, from 0 without gaps, [occurrences]."""
    document: I64
    """The id of its document, [occurrences]."""
    word: I64
    """The word of the document that it begins with, [occurrences]."""


def shared_passages(corpus: Measured, same: I64, scratch: Path, memory: int = MEMORY) -> Passages:
    """Yield the anchors that occur more than once; of documents with the same text in one of them.

    Takes 24 bytes of memory an occurrence, beside `memory`.

    Args:
        same: What `exact.same_texts` gives: these documents are left out.
        scratch: A folder for what does not fit in memory.
        memory: Bytes to stay below while sorting.
    """
    ends = [np.asarray(part.columns["anchor.ends"]) for part in corpus.parts]
    offsets = np.cumsum([0, *(each[-1] if len(each) else 0 for each in ends)])

    def rows() -> Iterator[tuple[U64, I64]]:
        for part, end, offset in zip(corpus.parts, ends, offsets[:-1], strict=True):
            kept = ~np.repeat(part.among(same[:, 0]), np.diff(end, prepend=0))
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
