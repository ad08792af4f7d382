"""Words, lines and the filters' numbers, beside the plainest Python that says the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_corpus import entries, parts_of, texts_of_python

from trainctl.config.registry import list_kinds, load_spec
from trainctl.data.quality import statistics
from trainctl.data.quality.batches import DocumentBatch, Entry, Spans
from trainctl.data.quality.columns import MeasuredCorpus
from trainctl.data.quality.decide import decide_removals
from trainctl.data.quality.measurement import WantedColumns, measure_all
from trainctl.data.quality.near_duplicates import find_identical_texts
from trainctl.data.quality.selection import Rules
from trainctl.data.quality.shuffle import search_in
from trainctl.errors import TrainctlError

TEXTS = st.lists(
    st.one_of(
        st.text(st.sampled_from("ab #*.…!\n \t{é中国\U0001f600"), max_size=50),
        st.lists(st.sampled_from(["a", "bb", "c.", "\n", "\n\n", "the"]), max_size=40).map(
            " ".join
        ),
    ),
    max_size=4,
)


def shown(batch: DocumentBatch, spans: Spans) -> list[list[str]]:
    """Return the spans of each document as texts."""
    found: list[list[str]] = [[] for _ in range(len(batch))]
    for start, end, document in zip(spans.starts, spans.ends, spans.document, strict=True):
        offset = batch.starts[document]
        found[document].append(batch.lowered[document][start - offset : end - offset])
    return found


def paragraphs(text: str) -> list[str]:
    found, rows = [], []
    for line in [*(line.strip() for line in text.split("\n")), ""]:
        if line:
            rows.append(line)
        elif rows:
            found.append(rows)
            rows = []
    return [" ".join(rows) for rows in found]


@given(TEXTS)
def test_words_lines_and_paragraphs(texts: list[str]) -> None:
    batch = DocumentBatch(entries(texts))
    lowered = [text.lower() for text in texts]
    words = [re.findall(r"[中国\U0001f600]|[ab_éa-z0-9]+", text) for text in lowered]
    assert shown(batch, batch.words) == words
    assert shown(batch, batch.tokens) == [text.split() for text in lowered]
    lines = [[line.strip() for line in text.split("\n") if line.strip()] for text in lowered]
    assert shown(batch, batch.lines) == lines
    found = [
        [re.sub(r"\s*\n\s*", " ", each) for each in every]
        for every in shown(batch, batch.paragraphs)
    ]
    assert found == [paragraphs(text) for text in lowered]


@given(TEXTS, st.integers(1, 5))
def test_equal_ngrams_have_equal_hashes(texts: list[str], size: int) -> None:
    batch = DocumentBatch(entries(texts))
    hashes, begin = batch.ngrams(size, short=False)
    words = [word for every in shown(batch, batch.words) for word in every]
    grams = [tuple(words[at : at + size]) for at in begin.tolist()]
    assert (
        len(set(grams))
        == len(set(hashes.tolist()))
        == len(set(zip(grams, hashes.tolist(), strict=True)))
    )
    counts = batch.total(batch.words)
    assert len(grams) == sum(max(0, count - size + 1) for count in counts)


def share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def again(items: list[str]) -> list[str]:
    """Every occurrence after the first."""
    seen: set[str] = set()
    return [each for each in items if each in seen or seen.add(each)]  # type: ignore[func-returns-value]


def plain_repetition(text: str) -> dict[str, float]:
    found = {}
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    found["repeated_lines"] = share(len(again(lines)), len(lines))
    found["repeated_lines_characters"] = share(sum(map(len, again(lines))), sum(map(len, lines)))
    words = text.split()
    every = sum(map(len, words))
    for size in range(2, 11):
        grams = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
        counts = Counter(grams)
        if size <= 4:
            top = max(
                (len("".join(gram)) * count for gram, count in counts.items() if count > 1),
                default=0,
            )
            found[f"top_{size}gram_characters"] = min(1.0, share(top, every))
        else:
            covered, seen = set(), set()
            for at, gram in enumerate(grams):
                if gram in seen:
                    covered |= set(range(at, at + size))
                seen.add(gram)
            found[f"repeated_{size}gram_characters"] = share(
                sum(len(words[at]) for at in covered), every
            )
    return found


def plain_quality(text: str) -> dict[str, float]:
    words = text.split()
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return {
        "words": len(words),
        "mean_word_length": share(sum(map(len, words)), len(words)),
        "hashes_per_word": share(text.count("#"), len(words)),
        "ellipses_per_word": share(
            len(re.findall(r"…(?!\.)|\.{3,}(?!…)|\.+…(?!\.)", text)), len(words)
        ),
        "lines": len(lines),
        "bullet_lines": share(sum(line[0] in "-*•" for line in lines), len(lines)),
        "ellipsis_lines": share(
            sum(line.endswith("...") or line.endswith("…") for line in lines), len(lines)
        ),
        "words_with_letters": share(
            sum(any(letter.isalpha() for letter in word) for word in words), len(words)
        ),
        "stop_words": len(
            {"the", "be", "to", "of", "and", "that", "have", "with"} & set(re.findall(r"\w+", text))
        ),
    }


@given(TEXTS)
def test_repetition(texts: list[str]) -> None:
    compare(statistics.gopher_repetition_statistics, plain_repetition, texts)


@pytest.mark.parametrize("plain", [plain_repetition, plain_quality])
def test_on_real_text(plain: Callable[[str], dict[str, float]]) -> None:
    every = texts_of_python(80)
    measure = (
        statistics.gopher_repetition_statistics
        if plain is plain_repetition
        else statistics.gopher_quality_statistics
    )
    compare(measure, plain, [*every["code"][:8], *every["prose"][:20]])


def compare(
    measure: Callable[[DocumentBatch], statistics.Statistics],
    plain: Callable[[str], dict[str, float]],
    texts: list[str],
) -> None:
    found = measure(DocumentBatch(entries(texts)))
    for number, text in enumerate(texts):
        for name, value in plain(text.lower()).items():
            assert found[name][number] == pytest.approx(value, abs=1e-6), (name, text[:200])


def test_quality() -> None:
    text = "• The end of that… and so\n\n* be with 12 #\n  dots... \n-- 34"
    found = {
        name: float(each[0])
        for name, each in statistics.gopher_quality_statistics(
            DocumentBatch([Entry(0, text)])
        ).items()
    }
    assert found == pytest.approx(plain_quality(text.lower()))
    assert found["stop_words"] == 6
    assert found["bullet_lines"] == 0.75


def test_c4_and_fineweb() -> None:
    text = (
        "This is a sentence. And one more!\nTurn on JavaScript, please now.\nno end\n"
        "{ lorem ipsum ..."
    )
    found = statistics.c4_statistics(DocumentBatch([Entry(0, text), Entry(1, "")]))
    assert found["sentences"].tolist() == [4, 0]
    assert found["c4_lines"].tolist() == [0.25, 0]
    assert found["curly_brackets"].tolist() == found["lorem_ipsum"].tolist() == [1, 0]
    web = statistics.fineweb_statistics(DocumentBatch([Entry(0, text + "\nno end")]))
    assert web["terminated_lines"].tolist() == pytest.approx([3 / 5])
    assert web["short_lines"].tolist() == pytest.approx([3 / 5])
    assert web["repeated_lines_characters"].tolist() == pytest.approx([6 / 93], abs=0.01)


def test_lists_of_words_and_addresses(tmp_path: Path) -> None:
    words, urls = tmp_path / "words.txt", tmp_path / "urls.txt"
    words.write_text("# bad\nBoo\nvery bad\n\n")
    urls.write_text("spam.example\nhttps://fine.example/bad/\n")
    given = [
        Entry(0, "Boo! Boo, very\nbad bad. Very good", "https://www.Spam.example:80/x?y"),
        Entry(1, "nothing", "http://fine.example/bad/page#top"),
        Entry(2, "", "http://fine.example/badness"),
        Entry(3, "boots"),
    ]
    found = statistics.word_list(DocumentBatch(given), file=str(words))
    assert found["listed"].tolist() == [3, 0, 0, 0]
    assert found["listed_share"][0] == pytest.approx(3 / 7)
    assert statistics.url_list(DocumentBatch(given), file=str(urls))["matches"].tolist() == [
        1,
        1,
        0,
        0,
    ]
    with pytest.raises(TrainctlError, match="cannot be read"):
        statistics.word_list(DocumentBatch(given), file=str(tmp_path / "none.txt"))


def test_a_list_may_lie_at_home_and_begin_with_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "urls.txt").write_text("\ufeffspam.example\n")
    given = DocumentBatch([Entry(0, "Boo", "https://spam.example/x")])
    assert statistics.url_list(given, file="~/urls.txt")["matches"].tolist() == [1]


def test_a_function_of_the_user_s() -> None:
    batch = DocumentBatch(entries(["abc", ""]))
    assert statistics.user_function(batch, call="builtins:len")["score"].tolist() == [3, 0]
    with pytest.raises(TrainctlError, match="failed with document 0: ValueError"):
        statistics.user_function(batch, call="builtins:float")
    with pytest.raises(TrainctlError, match="cannot be imported"):
        statistics.user_function(batch, call="builtins:nothing")


def test_units_agree_with_what_is_measured(tmp_path: Path) -> None:
    """Every bound has its key and its number; each filter runs on Python's own texts."""
    (tmp_path / "list.txt").write_text("boo\n")
    changes = {
        "words": {"file": str(tmp_path / "list.txt")},
        "urls": {"file": str(tmp_path / "list.txt")},
        "function": {"call": "builtins:len", "maximum": 50_000.0},
    }
    filters = {
        name: load_spec("filter", name).keys(**changes.get(name, {}))
        for name in list_kinds("filter")
    }
    texts = texts_of_python(80)
    parts = parts_of(
        {("code", "0"): list(texts["code"]), ("prose", "0"): list(texts["prose"])},
        code=filters,
        prose=filters,
    )
    measure_all(parts, tmp_path, WantedColumns(near=False))
    corpus = MeasuredCorpus.load(parts, tmp_path)
    rules = Rules(filters={"code": filters, "prose": filters})
    with search_in(corpus, tmp_path / "scratch") as search:
        same = find_identical_texts(search)
    selection = decide_removals(corpus, rules, same)
    gone = selection.counts["code"]
    assert gone["c4.max_curly_brackets"].applies > 0
    assert sum(each.documents for each in gone.values()) >= 0.9 * len(texts["code"])
    for tally in gone.values():
        assert tally.documents <= tally.applies

    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}
    filters["c4"].max_curly_brackets = None
    measure_all(parts, tmp_path, WantedColumns(near=False))
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("manifest.json")}
    again = decide_removals(corpus, rules, same)
    assert "c4.max_curly_brackets" not in again.counts["code"]
    assert again.stays.sum() >= selection.stays.sum()

    filters["function"].call = "builtins:hash"
    measure_all(parts, tmp_path, WantedColumns(near=False))
    assert all(path.stat().st_mtime_ns != time for path, time in before.items())


def test_nan_is_within_no_bound(tmp_path: Path) -> None:
    keys = load_spec("filter", "function").keys(call="math:sqrt", minimum=0.0)
    nan = np.float32("nan")
    from trainctl.data.quality.columns import ColumnWriter, MeasuredPart

    with ColumnWriter(tmp_path / "part", "key") as writer:
        writer.append({"number": np.arange(3), "characters": np.full(3, 5)})
        writer.append({"function.score": np.array([nan, -1, 1], dtype=np.float32)})
        writer.finish()
    corpus = MeasuredCorpus([MeasuredPart("s", "p", tmp_path / "part", 3, 0)])
    rules = Rules(filters={"s": {"function": keys}})
    assert decide_removals(corpus, rules, np.empty((0, 2), np.int64)).stays.tolist() == [
        False,
        False,
        True,
    ]
