"""Passages that documents share are found wherever they stand, and shorter ones are not."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_corpus import entries, parts_of

from trainctl.data.quality.batches import DocumentBatch
from trainctl.data.quality.columns import MeasuredCorpus
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import (
    ANCHOR_WORDS,
    SHARED,
    WantedColumns,
    anchors,
    measure_all,
    words_covered,
)
from trainctl.data.quality.near_duplicates import find_identical_texts, shared_passages
from trainctl.data.quality.selection import SUBSTRING, Rules
from trainctl.data.quality.shuffle import MEMORY, search_in


def text(words: list[int]) -> str:
    return " ".join(f"w{each}" for each in words)


def drawn(count: int, draw: random.Random) -> list[int]:
    return [draw.randrange(10**9) for _ in range(count)]


@given(
    shared=st.integers(0, 120),
    sides=st.lists(st.integers(0, 90), min_size=4, max_size=4),
    seed=st.integers(0, 1 << 32),
)
def test_what_two_documents_share(shared: int, sides: list[int], seed: int) -> None:
    draw = random.Random(seed)
    words = drawn(shared, draw)
    texts = [
        text([*drawn(before, draw), *words, *drawn(after, draw)])
        for before, after in (sides[:2], sides[2:])
    ]
    hashes, at, counts = anchors(DocumentBatch(entries(["x", *texts])))
    split = [set(each.tolist()) for each in np.split(hashes, np.cumsum(counts)[:-1])]
    assert not split[0]
    common = split[1] & split[2]
    if shared >= SHARED:
        assert common
    if shared < ANCHOR_WORDS:
        assert not common
    for places in np.split(at, np.cumsum(counts)[:-1]):
        assert (np.diff(places) > 0).all()


def test_words_in_passages_count_once() -> None:
    assert words_covered(np.array([], dtype=np.int64)) == 0
    assert words_covered(np.array([7])) == 25
    assert words_covered(np.array([0, 10, 100])) == 60


@pytest.mark.parametrize("memory", [512, MEMORY])
def test_documents_of_passages_of_others_go(tmp_path: Path, memory: int) -> None:
    """The first occurrence stays. A removed document does not cause others to be removed."""
    draw = random.Random(1)
    first, second = drawn(300, draw), drawn(300, draw)
    mostly = [*first[:250], *drawn(40, draw)]
    texts = {
        ("one", "a"): [text(first), text(mostly), text(second), text(second)],
        ("one", "b"): [
            text([*first[100:200], *drawn(200, draw)]),
            text([*second[:120], *first[:120]]),
            text(drawn(20, draw)),
            text([*mostly[250:], *drawn(10, draw)]),
        ],
    }
    parts = parts_of(texts)
    measure_all(parts, tmp_path, WantedColumns(passages=True))
    corpus = MeasuredCorpus.load(parts, tmp_path)
    with search_in(corpus, tmp_path / "scratch", memory) as search:
        same = find_identical_texts(search)
        passages = shared_passages(search, same)
    selection = decide_removals(corpus, Rules(substring=0.6), same, passages=passages)
    gone = [corpus.where(each) for each in np.flatnonzero(selection.why).tolist()]
    assert [(part.name, number) for part, number in gone] == [("a", 1), ("a", 3), ("b", 1)]
    shares = {each.number: each.value for each in selection.examples["one"][SUBSTRING]}
    assert shares[1] == pytest.approx(250 / 290, abs=0.2)
    assert selection.counts["one"][SUBSTRING].documents == 2
