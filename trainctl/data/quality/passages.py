"""Shared passages of documents, found by common anchors."""

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
    """Anchors that occur more than once, ordered by document and word."""

    anchor: I64
    """Number of the anchor, from 0 without gaps, [occurrences]."""
    document: I64
    """Id of the document, [occurrences]."""
    word: I64
    """Word of the document at which the anchor begins, [occurrences]."""


def shared_passages(corpus: Measured, same: I64, scratch: Path, memory: int = MEMORY) -> Passages:
    """Return the anchors that occur more than once. Copies of a text (`same`) are left out.

    This takes 24 bytes of memory an occurrence beside `memory`, the bytes used for sorting.
    `scratch` is a folder for what does not fit.
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
