"""Duplicates of a corpus for all rules, found once and stored beside its columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from trainctl.data.quality.columns import Columns, ColumnWriter, key_of
from trainctl.data.quality.corpus import Measured
from trainctl.data.quality.exact_duplicates import find_identical_texts
from trainctl.data.quality.groups import MEMORY
from trainctl.data.quality.hashing import I64
from trainctl.data.quality.near_duplicates import Pairs, near_pairs
from trainctl.data.quality.passages import Passages, shared_passages
from trainctl.data.quality.selection import Rules

_NOTHING = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Identical texts, near duplicates and shared passages; empty where the rules need none."""

    same: I64
    pairs: Pairs
    passages: Passages


def find_duplicates(
    corpus: Measured, rules: Rules, folder: Path, memory: int = MEMORY
) -> Duplicates:
    """Return the duplicates that the rules need, from `folder` if they were found before.

    Otherwise they are found and stored there. Raising `near` or changing filters needs nothing new.
    Sorting stays below `memory` bytes, with temporary files beside the folder.
    """
    wanted = (rules.near is not None, rules.substring is not None)
    key = key_of_corpus(corpus, *wanted)
    if key_of(folder) == key:
        found = Columns.load(folder)
        if rules.near is None or found.manifest["near"] <= rules.near:
            return _loaded(found)
    scratch = folder.with_name(f".{folder.name}.scratch")
    same = find_identical_texts(corpus, scratch, memory)
    pairs = Pairs(_NOTHING.reshape(0, 2), np.empty(0, np.float32))
    if rules.near is not None:
        pairs = near_pairs(corpus, same, rules.near, scratch, memory=memory)
    passages = Passages(_NOTHING, _NOTHING, _NOTHING)
    if rules.substring is not None:
        passages = shared_passages(corpus, same, scratch, memory)
    with ColumnWriter(folder, key) as writer:
        writer.append({"same": same, "pairs": pairs.ids, "jaccard": pairs.jaccard})
        writer.append(
            {
                "anchor": passages.anchor,
                "anchor.document": passages.document,
                "anchor.word": passages.word,
            }
        )
        writer.finish(near=rules.near)
    return Duplicates(same, pairs, passages)


def key_of_corpus(corpus: Measured, *others: object) -> str:
    """Return a digest of everything measured, in the order of the ids, and of other values."""
    parts: Sequence[object] = [
        (part.source, part.name, part.columns.manifest["key"]) for part in corpus.parts
    ]
    return sha256(json.dumps([parts, others], sort_keys=True).encode()).hexdigest()


def _loaded(found: Columns) -> Duplicates:
    return Duplicates(
        found["same"],
        Pairs(found["pairs"], found["jaccard"]),
        Passages(found["anchor"], found["anchor.document"], found["anchor.word"]),
    )
