"""Exact duplicates within and across sources, by 128-bit hashes of texts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from trainctl.data.quality.corpus import Measured
from trainctl.data.quality.groups import MEMORY, equal_keys
from trainctl.data.quality.hashing import I64, U64


def find_identical_texts(corpus: Measured, scratch: Path, memory: int = MEMORY) -> I64:
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
        order = np.lexsort((ids, rest, group))  # by the other 64 bits, which rarely split a group
        ids, rest, group = ids[order], rest[order], group[order]
        is_first = np.ones(len(ids), dtype=np.bool_)
        is_first[1:] = (group[1:] != group[:-1]) | (rest[1:] != rest[:-1])
        firsts = ids[is_first][np.cumsum(is_first) - 1]
        found.append(np.stack((ids, firsts), axis=1)[~is_first])
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 0])]
