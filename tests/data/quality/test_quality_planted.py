"""Tests that planted copies are found, and that each removed document resembles a kept one."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
from planted_corpus import Planted, entries, five_grams, jaccard, parts_of, planted

from trainctl.data.quality.columns import MeasuredCorpus
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import WantedColumns, measure_all
from trainctl.data.quality.near_duplicates import Pairs, find_identical_texts, near_pairs
from trainctl.data.quality.selection import (
    CONTAMINATED,
    EXACT,
    NEAR,
    Contamination,
    Rules,
    Selection,
    words_from,
    write_held_out,
)
from trainctl.data.quality.shuffle import search_in

THRESHOLDS = (0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Case:
    """The planted corpus, measured, with its duplicates found."""

    planted: Planted
    corpus: MeasuredCorpus
    same: np.ndarray
    pairs: Pairs

    @cached_property
    def grams(self) -> list[frozenset[tuple[str, ...]]]:
        """5-grams of each document."""
        return [five_grams(self.text(document)) for document in range(self.corpus.documents)]

    @cached_property
    def having(self) -> dict[tuple[str, ...], list[int]]:
        """The documents that have a 5-gram."""
        found = defaultdict(list)
        for document, grams in enumerate(self.grams):
            for gram in grams:
                found[gram].append(document)
        return found

    def nearest(self, document: int, among: np.ndarray) -> float:
        """Return the highest Jaccard index of a document with one of the documents in the mask."""
        shared = Counter(other for gram in self.grams[document] for other in self.having[gram])
        return max(
            jaccard(self.grams[document], self.grams[other])
            for other, _ in shared.most_common(20)
            if among[other]
        )

    def ids(self, documents: list[tuple[str, str, int]]) -> list[int]:
        firsts = {(part.source, part.name): part.first for part in self.corpus.parts}
        return [firsts[source, part] + number for source, part, number in documents]

    def text(self, document: int) -> str:
        part, number = self.corpus.where(document)
        return self.planted.text((part.source, part.name, number))


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("columns")
    corpus = planted()
    held_out = folder / "held_out"
    write_held_out(held_out, entries(corpus.held_out))
    parts = parts_of(corpus.texts)
    measure_all(parts, folder, WantedColumns(held_out=held_out))
    measured = MeasuredCorpus.load(parts, folder, ["code", "prose"])
    with search_in(measured, folder / "scratch") as search:
        same = find_identical_texts(search)
        pairs = near_pairs(search, same, min(THRESHOLDS))
    return Case(corpus, measured, same, pairs)


def test_all_copies_go_and_the_one_of_the_first_source_stays(case: Case) -> None:
    selection = decide_removals(case.corpus, Rules(), case.same)
    copies, originals = (case.ids(list(each)) for each in zip(*case.planted.copies, strict=True))
    assert np.flatnonzero(selection.why).tolist() == sorted(copies)
    assert selection.stays[originals].all()
    assert selection.counts == {"planted": {EXACT: selection.counts["planted"][EXACT]}}
    assert selection.counts["planted"][EXACT].documents == len(copies)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_near_copies_go(case: Case, threshold: float) -> None:
    """At least 95 % of the copies above the threshold are removed, and only documents that resemble
    a kept one.
    """
    selection = decide_removals(case.corpus, Rules(near=threshold), case.same, case.pairs)
    near, originals = (case.ids(list(each)) for each in zip(*case.planted.near, strict=True))
    indices = [
        jaccard(case.grams[each], case.grams[other])
        for each, other in zip(near, originals, strict=True)
    ]
    above = [each for each, index in zip(near, indices, strict=True) if index >= threshold]
    assert len(above) >= 50
    assert (~selection.stays[above]).mean() >= 0.95

    gone = np.flatnonzero(selection.why == 1 + selection.reasons.index(NEAR)).tolist()
    nearest = [case.nearest(each, selection.stays) for each in gone]
    assert sum(each < threshold for each in nearest) <= 0.02 * len(gone)
    assert min(nearest) >= threshold - 0.02  # sketches of the longest texts are a sample


def test_a_copy_is_named_with_what_stays(case: Case) -> None:
    selection = decide_removals(case.corpus, Rules(near=0.7), case.same, case.pairs)
    for reason, least in ((EXACT, 1.0), (NEAR, 0.69)):
        examples = selection.examples["planted"][reason]
        assert 0 < len(examples) <= 5
        for each in examples:
            assert each.like is not None
            gone = case.planted.text((each.source, each.part, each.number))
            like = case.planted.text(each.like)
            found = jaccard(five_grams(gone), five_grams(like))
            assert found >= least
            assert reason == EXACT or found == pytest.approx(each.value, abs=0.02)


def test_all_held_out_passages_are_found_and_nothing_else(case: Case) -> None:
    rules = Rules(exact=False, contamination=Contamination())
    selection = decide_removals(case.corpus, rules, case.same)
    assert np.flatnonzero(selection.why).tolist() == sorted(case.ids(case.planted.contaminated))
    for each in selection.examples["planted"][CONTAMINATED]:
        assert each.word is not None
        found = words_from(case.planted.text((each.source, each.part, each.number)), each.word)
        first = found.split(",")[0]
        assert any(first in text.split() for text in case.planted.held_out)


def test_a_selection_is_kept(case: Case, tmp_path: Path) -> None:
    selection = decide_removals(
        case.corpus, Rules(near=0.8, contamination=Contamination()), case.same, case.pairs
    )
    selection.write(tmp_path / "selection", "key")
    again = Selection.load(tmp_path / "selection")
    assert again.why.tolist() == selection.why.tolist()
    assert (again.counts, again.examples, again.reasons, again.parts) == (
        selection.counts,
        selection.examples,
        selection.reasons,
        selection.parts,
    )
