"""`data stats`: documents, lengths and copies, against counting them by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.config.compose import compose
from trainctl.data import statistics
from trainctl.data.corpora import build_corpora
from trainctl.data.statistics import PERCENTILES, SourceText, document_hashes, statistics_of
from trainctl.data.tokenizer import ByteTokenizer

documents = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12)


def text_of(found: list[list[int]]) -> SourceText:
    tokens = np.array([token for each in found for token in each], dtype=np.uint16)
    return SourceText(tokens, np.cumsum([len(each) for each in found], dtype=np.uint64), 2, 30)


def text(ids: list[int]) -> str:
    return "ab" * len(ids)


def statistics_in_one_pass(texts, decode):
    hashes = {
        name: document_hashes(each.tokens, np.array([0, *each.ends[:]], dtype=np.int64))
        for name, each in texts.items()
    }
    return statistics_of(texts, decode, hashes)


@given(documents, documents)
def test_statistics_equal_a_plain_count(first: list[list[int]], second: list[list[int]]) -> None:
    found = statistics_in_one_pass({"first": text_of(first), "second": text_of(second)}, text)
    before: set[tuple[int, ...]] = set()
    for name, each in (("first", first), ("second", second)):
        lengths = sorted(map(len, each))
        own = found[name]
        copies = 0
        for document in filter(None, each):
            copies += tuple(document) in before
            before.add(tuple(document))
        assert own.copies == copies
        assert (own.documents, own.tokens) == (len(each), sum(lengths))
        assert (own.held_out_documents, own.held_out_tokens) == (2, 30)
        assert own.bytes_per_token == (2.0 if sum(lengths) else None)
        assert own.longest == max(lengths, default=0)
        power = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8}
        assert own.lengths == Counter(power[length] for length in lengths)
        for level in PERCENTILES if lengths else ():
            at = own.percentiles[level]
            assert sum(length <= at for length in lengths) * 100 >= level * len(lengths)
            assert sum(length < at for length in lengths) * 100 < level * len(lengths)


def test_tasks_count_what_one_pass_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of some documents; one source has copies of the other, and an empty document."""
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(statistics, "_RANGE_TOKENS", 50)
    for name, texts in (("a", ["one", "two " * 30, "one", ""]), ("b", ["two " * 30, "x" * 70])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts * 3)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    each = "{{paths: [{}], weight: 1, held_out_fraction: 0}}"
    sources = ", ".join(f"{name}: {each.format(tmp_path / f'{name}.jsonl')}" for name in "ab")
    config = compose(["recipe=tiny", f"data.sources={{{sources}}}"]).config
    build_corpora(config, ByteTokenizer())
    (tmp_path / "cache").rename(tmp_path / "moved")
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "moved"))
    shown: list[tuple[int, int]] = []
    found = statistics.corpus_statistics(config, lambda done, whole: shown.append((done, whole)))
    texts_of = statistics._source_texts(config, ByteTokenizer())
    assert found == statistics_in_one_pass(texts_of, ByteTokenizer().decode)
    assert (found["a"].copies, found["b"].copies) == (9, 5)
    assert len(shown) > 6 and shown[-1][0] == shown[-1][1] and shown == sorted(shown)
    assert not list((tmp_path / "moved").glob("statistics-*"))
