"""The order of parts, what is done together, and how much memory there is change nothing."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted_corpus import edited, entries, five_grams, jaccard, parts_of, texts_of_python

from trainctl.data.executors import INLINE, Executor, LocalExecutor
from trainctl.data.quality.batches import DocumentBatch, Entry, Segments, batches
from trainctl.data.quality.columns import MeasuredCorpus
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import (
    SKETCH,
    Bands,
    WantedColumns,
    measure_all,
    ngram_sets,
    signatures,
    sketches,
)
from trainctl.data.quality.measurement import jaccard as jaccard_of_sketches
from trainctl.data.quality.near_duplicates import (
    connected_components,
    find_identical_texts,
    near_pairs,
)
from trainctl.data.quality.selection import Contamination, Rules, write_held_out
from trainctl.data.quality.shuffle import MEMORY, Groups, Result, joined, search_in, shuffle
from trainctl.data.source_sampler import splitmix64
from trainctl.options.filter.gopher_quality import GopherQualityConfig

WORDS = st.lists(st.sampled_from(["a", "b", "the", "sea", "ship"]), max_size=14).map(" ".join)
CORPORA = st.dictionaries(
    st.tuples(st.sampled_from(["one", "two"]), st.sampled_from("abc")),
    st.lists(WORDS, max_size=6),
    max_size=6,
)
RULES = Rules(
    near=0.5,
    contamination=Contamination(max_documents=3),
    filters={"one": {"gopher_quality": GopherQualityConfig(min_words=4)}},
)
HELD_OUT = entries(["the sea the ship the wind the sea", "a b a b a b a b a b a b a b a"])

Outcome = dict[tuple[str, str, int], str]


def outcome(
    texts: dict[tuple[str, str], list[str]], *, memory: int = MEMORY, executor: Executor = INLINE
) -> Outcome:
    """Why each document of a corpus goes."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_held_out(folder / "held_out", HELD_OUT)
        parts = parts_of(texts, **RULES.filters)
        wanted = WantedColumns(held_out=folder / "held_out")
        measure_all(parts, folder, wanted, executor=executor)
        corpus = MeasuredCorpus.load(parts, folder, ["two", "one"])
        with search_in(corpus, folder / "scratch", memory) as search:
            same = find_identical_texts(search)
            pairs = near_pairs(search, same, 0.5)
        selection = decide_removals(corpus, RULES, same, pairs)
        assert not (folder / "scratch").exists()
        result = {}
        for document, why in enumerate(selection.why.tolist()):
            part, number = corpus.where(document)
            reason = selection.reasons[why - 1] if why else ""
            result[part.source, part.name, number] = reason
        return result


@settings(max_examples=12)
@given(CORPORA, st.randoms(use_true_random=False))
def test_the_order_of_parts_changes_nothing(
    texts: dict[tuple[str, str], list[str]], draw: random.Random
) -> None:
    shuffled = list(texts.items())
    draw.shuffle(shuffled)
    assert outcome(dict(shuffled)) == outcome(texts)


@settings(max_examples=6)
@given(CORPORA)
def test_little_memory_changes_nothing(texts: dict[tuple[str, str], list[str]]) -> None:
    assert outcome(texts, memory=4096) == outcome(texts)


def test_the_number_of_processes_changes_nothing() -> None:
    draw = random.Random(3)
    texts = {
        (source, part): [
            " ".join(draw.choices(["a", "b", "the", "sea", "ship"], k=draw.randrange(12)))
            for _ in range(8)
        ]
        for source in ("one", "two")
        for part in "abc"
    }
    found = outcome(texts)
    assert len(set(found.values())) == 5
    assert outcome(texts, executor=LocalExecutor(2)) == found


@settings(max_examples=12)
@given(CORPORA)
def test_what_goes_as_similar_is_similar_to_what_stays(
    texts: dict[tuple[str, str], list[str]],
) -> None:
    found = outcome(texts)
    sets = {document: five_grams(texts[document[:2]][document[2]]) for document in found}
    staying = [document for document, reason in found.items() if not reason]
    for document, reason in found.items():
        words = texts[document[:2]][document[2]].split()
        if reason == "near" and len(words) >= 5:
            assert max(jaccard(sets[document], sets[other]) for other in staying) >= 0.5
        if reason == "exact":
            twins = [other for other in found if texts[other[:2]][other[2]].split() == words]
            assert len(twins) > 1


@given(st.lists(st.text(max_size=40), max_size=12), st.integers(1, 60))
def test_batches_change_no_document(texts: list[str], characters: int) -> None:
    def numbers(size: int) -> list[bytes]:
        found = []
        for batch in batches(entries(texts), size):
            values, counts = ngram_sets(batch)
            rows = signatures(values, counts)
            found += [
                row.tobytes() + bytes([count]) for row, count in zip(rows, counts, strict=True)
            ]
        return found

    assert numbers(characters) == numbers(1 << 20)


@given(st.lists(st.integers(0, 5), max_size=30), st.data())
def test_segments_have_the_same_hash_where_they_are_the_same(
    values: list[int], data: st.DataObject
) -> None:
    place = st.integers(0, len(values))
    spans = [sorted((data.draw(place), data.draw(place))) for _ in range(6)]
    starts, ends = np.array(spans).T
    hashes = Segments(np.array(values, dtype=np.uint32)).hashes(starts, ends).tolist()
    for left, one in zip(spans, hashes, strict=True):
        for right, other in zip(spans, hashes, strict=True):
            same = values[left[0] : left[1]] == values[right[0] : right[1]]
            assert same == (one == other)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=40))
def test_components_are_what_hangs_together(pairs: list[tuple[int, int]]) -> None:
    lowest = {each: each for pair in pairs for each in pair}
    for _ in lowest:
        for left, right in pairs:
            lowest[left] = lowest[right] = min(lowest[left], lowest[right])
    ids, found = connected_components(np.array(pairs))
    assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == lowest


def places(groups: Groups) -> Result:
    return {"id": groups[0], "size": groups[1]}


@settings(max_examples=20)
@given(st.lists(st.integers(0, 9), max_size=60), st.sampled_from([512, 1024, MEMORY]))
def test_equal_keys_are_all_found(values: list[int], memory: int) -> None:
    keys = splitmix64(np.array(values, dtype=np.uint64))
    ids = np.arange(len(keys))
    inputs = [(partial(lambda at: [(keys[at], ids[at])], slice(n, n + 7)), 7) for n in (0, 7, 14)]
    inputs.append((lambda: [(keys[21:], ids[21:])], max(0, len(keys) - 21)))
    with (
        TemporaryDirectory() as folder,
        search_in(MeasuredCorpus([]), Path(folder) / "scratch", memory) as search,
    ):
        results = shuffle(search, "equal", inputs, places)
        ends = np.cumsum(joined(results, "size"))
        found = [each.tolist() for each in np.split(joined(results, "id"), ends)[:-1]]
    expected = [[at for at, each in enumerate(values) if each == value] for value in set(values)]
    assert sorted(found) == sorted(group for group in expected if len(group) > 1)


@pytest.mark.parametrize("share", [0.005, 0.02, 0.1])
def test_jaccard_of_long_documents_is_estimated(share: float) -> None:
    long = "\n".join(texts_of_python(80)["code"][:30])
    assert len(five_grams(long)) > 4 * SKETCH
    other = edited(long, share, random.Random(1))
    sets = [ngram_sets(DocumentBatch([Entry(0, text)])) for text in (long, other)]
    found = float(jaccard_of_sketches(sketches(*sets[0]), sketches(*sets[1]))[0])
    assert found == pytest.approx(jaccard(five_grams(long), five_grams(other)), abs=0.03)
    alike = (signatures(*sets[0]) == signatures(*sets[1])).mean()
    assert alike == pytest.approx(found, abs=0.2)


@pytest.mark.parametrize("threshold", [0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
def test_bands_find_what_is_at_the_threshold(threshold: float) -> None:
    bands = Bands.for_threshold(threshold)
    assert bands.recall(threshold) >= 0.95
    longer = Bands(112 // (bands.rows + 1), bands.rows + 1)
    assert longer.recall(threshold) < 0.95


def test_a_search_that_failed_continues_and_takes_nothing_of_another(tmp_path: Path) -> None:
    keys = splitmix64(np.arange(100, dtype=np.uint64) // 2)
    asked: list[str] = []

    def rows() -> list[tuple[np.ndarray, np.ndarray]]:
        asked.append("rows")
        return [(keys, np.arange(100))]

    def reduce(groups: Groups) -> Result:
        if asked.count("range") == 3 and asked[-1] != "failed":
            asked.append("failed")
            raise KeyError(3)
        asked.append("range")
        return places(groups)

    (tmp_path / "scratch" / "of another").mkdir(parents=True)
    for memory in (1024, 1024, 2048):
        is_first = not asked
        with (
            pytest.raises(KeyError) if is_first else nullcontext(),
            search_in(MeasuredCorpus([]), tmp_path / "scratch", memory) as search,
        ):
            found = joined(shuffle(search, "equal", [(rows, 100)], reduce), "id")
            assert sorted(found.tolist()) == list(range(100))
        assert (tmp_path / "scratch").exists() == is_first
        assert not (tmp_path / "scratch" / "of another").exists()
    assert asked == ["rows", *["range"] * 3, "failed", *["range"] * 5, "rows", *["range"] * 4]
