"""Tests of which documents of a corpus are trained on, with planted copies."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from trainctl.config.compose import compose
from trainctl.config.registry import new_section
from trainctl.config.schema import Dedup
from trainctl.data import document_selection, tasks
from trainctl.data.corpus import CorpusBuilder, build_corpus
from trainctl.data.corpus_record import Corpus
from trainctl.data.quality import measurement
from trainctl.data.text_search import examples_of
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plans.mixture import SINGLE_SOURCE

DRAW = random.Random(3)
WORDS = [f"word{number}" for number in range(4000)]


def text(words: int = 120) -> str:
    return " ".join(DRAW.choices(WORDS, k=words))


def near(of: str, changed: int = 1) -> str:
    """Return the text with `changed` words replaced. In 120 words, each takes 5 of the 116
    5-grams.
    """
    words = of.split()
    for place in range(changed):
        words[20 + 30 * place] = f"other{place}"
    return " ".join(words)


TEXTS = [text() for _ in range(20)]
HELD_OUT = [text(60), text(60)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def lines(file: Path, texts: list[str], key: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({key: each}) + "\n" for each in texts))
    return file


def config(*paths: Path, **keys: Any) -> Any:
    keys = {"held_out_fraction": 0.0, **keys}
    return new_section("data", "files", paths=[str(path) for path in paths], **keys)


def cached_corpus(section: Any, run_data: Any = None, name: str = SINGLE_SOURCE) -> Corpus | None:
    builder = CorpusBuilder(
        config=section, tokenizer=ByteTokenizer(), run_data=run_data or section, name=name
    )
    return builder.cached()


def documents(corpus: Corpus, side: str = "train") -> list[str]:
    split = getattr(corpus, side)
    if not split.tokens:
        return []
    ids, ends = corpus.tokens(split), corpus.ends(split)
    found = [
        bytes(ids[begin : end - 1].astype("u1"))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return [each.decode() for each in found]


def dropped(corpus: Corpus) -> dict[str, Any]:
    return json.loads((Path(corpus.folder) / document_selection.DROPPED).read_text())


def reasons(corpus: Corpus) -> dict[str, int]:
    return {name: each["documents"] for name, each in dropped(corpus)["reasons"].items()}


def test_nothing_asked_changes_nothing(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", TEXTS + TEXTS)
    plain = build_corpus(config(file), ByteTokenizer())
    assert not (Path(plain.folder) / document_selection.DROPPED).exists()
    assert build_corpus(config(file, filters={"c4": None}), ByteTokenizer()) == plain
    assert len(documents(plain)) == 40


def test_copies_go_and_the_first_stays(tmp_path: Path) -> None:
    first = lines(tmp_path / "a.jsonl", TEXTS[:10])
    second = lines(tmp_path / "b.jsonl", [TEXTS[3], *TEXTS[10:], near(TEXTS[4]), TEXTS[12]])
    exact = build_corpus(config(first, second, dedup=Dedup.exact), ByteTokenizer())
    assert documents(exact) == [*TEXTS, near(TEXTS[4])]
    assert reasons(exact) == {"exact": 2}
    close = build_corpus(config(first, second, dedup=Dedup.minhash), ByteTokenizer())
    assert documents(close) == TEXTS
    assert reasons(close) == {"exact": 2, "near": 1}
    assert exact.digest != close.digest
    assert dropped(close)["documents"] == 23 and dropped(close)["stay"] == 20


def test_another_threshold_reads_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = lines(
        tmp_path / "a.jsonl", [*TEXTS, near(TEXTS[0], 1), near(TEXTS[1], 3), "three words x"]
    )
    keys = {"filters": {"gopher_quality": {"min_stop_words": None}}, "dedup": Dedup.minhash}
    few = build_corpus(config(file, **keys), ByteTokenizer())
    assert reasons(few) == {"gopher_quality.min_words": 1, "near": 1}

    def refuse(*_: object) -> None:
        raise AssertionError("a text is read")

    monkeypatch.setattr(measurement, "batches", refuse)
    monkeypatch.setattr(document_selection, "read_documents", refuse)
    again = config(file, **{**keys, "dedup_threshold": 0.95})
    assert reasons(build_corpus(again, ByteTokenizer())) == {"gopher_quality.min_words": 1}
    keys["filters"] = {"gopher_quality": {"min_stop_words": None, "min_words": 2}}
    more = build_corpus(config(file, **keys), ByteTokenizer())
    assert reasons(more) == {"near": 1}
    assert cached_corpus(config(file, **keys)) == more


def test_what_is_held_out_stays_and_its_copies_go(tmp_path: Path) -> None:
    train = lines(tmp_path / "train.jsonl", [HELD_OUT[0], near(HELD_OUT[1], 1), *TEXTS])
    held_out = lines(tmp_path / "z.jsonl", [*HELD_OUT, "short"])
    asked = config(
        train,
        held_out_paths=[str(held_out)],
        dedup=Dedup.minhash,
        dedup_threshold=0.7,
        filters={"gopher_quality": {"min_stop_words": None}},
    )
    corpus = build_corpus(asked, ByteTokenizer())
    assert documents(corpus, "held_out") == [*HELD_OUT, "short"]
    assert documents(corpus) == TEXTS
    assert reasons(corpus) == {"exact": 1, "near": 1}


def test_held_out_passages_are_found(tmp_path: Path) -> None:
    """Passages come from the run's own held-out side and from a file of another format."""
    passage = " ".join(HELD_OUT[0].split()[10:30])
    other = " ".join(HELD_OUT[1].split()[30:50])
    planted = [f"{TEXTS[0]} {passage} {TEXTS[1]}", f"{TEXTS[2]} {other}"]
    train = lines(tmp_path / "train.jsonl", [*TEXTS, *planted])
    held_out = lines(tmp_path / "held.jsonl", [HELD_OUT[0]])
    (tmp_path / "bench.csv").write_text(f"id,text\n1,{HELD_OUT[1]}\n")
    keys: dict[str, Any] = {"held_out_paths": [str(held_out)]}
    own = build_corpus(config(train, decontaminate=["held_out"], **keys), ByteTokenizer())
    assert documents(own) == [*TEXTS, planted[1]]
    both = config(train, decontaminate=["held_out", str(tmp_path / "bench.csv")], **keys)
    corpus = build_corpus(both, ByteTokenizer())
    assert documents(corpus) == TEXTS and reasons(corpus) == {"contamination": 2}
    (example, _) = dropped(corpus)["examples"]["contamination"]
    assert example["word"] in (120, 120) and example["value"] == 8


def test_sources_give_way_to_those_before_them(tmp_path: Path) -> None:
    shared, close = TEXTS[0], near(TEXTS[1])
    lines(tmp_path / "web.jsonl", [shared, close, *TEXTS[2:8], "few words"])
    lines(tmp_path / "books.jsonl", [TEXTS[1], *TEXTS[8:], shared, "few words"])
    asked = [
        "data.sources.web={paths: [web.jsonl], weight: 1}",
        "data.sources.books={paths: [books.jsonl], weight: 1, "
        "filters: {gopher_quality: {min_stop_words: null}}}",
        "data.dedup=minhash",
    ]

    def of(*more: str) -> dict[str, list[str]]:
        whole = compose([*asked, *more]).config.data
        found = {}
        for name, section in whole.sources.items():
            corpus = build_corpus(section, ByteTokenizer(), run_data=whole, name=name)
            assert cached_corpus(section, whole, name) == corpus
            found[name] = [*documents(corpus), *documents(corpus, "held_out")]
        return found

    fraction = ["data.sources.web.held_out_fraction=0", "data.sources.books.held_out_fraction=0"]
    first = of(*fraction)
    assert first["web"] == [shared, close, *TEXTS[2:8], "few words"]
    assert first["books"] == TEXTS[8:]
    second = of(*fraction, "data.dedup_precedence=[books]")
    assert second["books"] == [TEXTS[1], *TEXTS[8:], shared]
    assert second["web"] == [*TEXTS[2:8], "few words"]  # what a filter took keeps no copy away


def test_a_corpus_is_another_where_other_sources_have_other_texts(tmp_path: Path) -> None:
    """Their key of the text and their held-out share decide here, too."""
    lines(tmp_path / "web.jsonl", TEXTS)
    others = [text() for _ in range(20)]
    bodies = zip(others, [*TEXTS[:10], *others[10:]], strict=True)
    rows = [json.dumps({"text": other, "body": body}) for other, body in bodies]
    (tmp_path / "books.jsonl").write_text("\n".join(rows))
    of_each = (
        f"{name}: {{paths: [{name}.jsonl], weight: 1, held_out_fraction: 0}}"
        for name in ("web", "books")
    )
    sources = f"data.sources={{{', '.join(of_each)}}}"

    def left(*more: str) -> int:
        whole = compose([sources, *more]).config.data
        corpus = build_corpus(whole.sources["web"], ByteTokenizer(), run_data=whole, name="web")
        return corpus.train.documents

    copies = ["data.dedup=exact", "data.dedup_precedence=[books]"]
    assert left(*copies) == 20
    assert left(*copies, "data.sources.books.text_key=body") == 10
    last = ["data.dedup=exact", "data.sources.books.text_key=body"]
    assert left(*last) == 20
    assert left(*last, "data.sources.books.held_out_fraction=0.5") < 20


def test_a_damaged_part_of_another_source_is_made_again(tmp_path: Path) -> None:
    lines(tmp_path / "web.jsonl", TEXTS)
    lines(tmp_path / "books.jsonl", TEXTS[:10])
    sources = (
        "data.sources={web: {paths: [web.jsonl], weight: 1, held_out_fraction: 0}, books: "
        "{paths: [books.jsonl], weight: 1, held_out_fraction: 0, on_bad_text: skip}}"
    )
    asked = [sources, "data.dedup=exact", "data.dedup_precedence=[books]"]
    whole = compose(asked).config.data
    build_corpus(whole.sources["books"], ByteTokenizer())
    (origin,) = (tmp_path / "cache").glob("store-*/parts/*/origin.bin")
    origin.write_bytes(b"")
    web = build_corpus(whole.sources["web"], ByteTokenizer(), run_data=whole, name="web")
    assert documents(web) == TEXTS[10:]


def test_nothing_left_says_what_took_it(tmp_path: Path) -> None:
    file = lines(tmp_path / "a.jsonl", [*TEXTS[:4], TEXTS[0]])
    asked = config(file, filters={"gopher_quality": {"min_words": 500}}, dedup=Dedup.exact)
    with pytest.raises(TrainctlError, match=r"of 5 documents gopher_quality\.min_words took 5"):
        build_corpus(asked, ByteTokenizer())


def test_lists_and_functions_are_read_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lines(tmp_path / "a.jsonl", ["an apple a day", "a pear or two", "nothing at all"])
    listed = tmp_path / "bad.txt"
    asked = config(file, filters={"words": {"file": str(listed)}})
    listed.write_text("apple\n")
    assert len(documents(build_corpus(asked, ByteTokenizer()))) == 2
    listed.write_text("apple\npear\n")
    measurement.function_of("filter", "words")  # loaded
    from trainctl.data.quality import statistics

    statistics._hash_entries.cache_clear()
    assert documents(build_corpus(asked, ByteTokenizer())) == ["nothing at all"]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "scores_of_mine.py").write_text("def length(text):\n    return len(text)\n")
    asked = config(file, filters={"function": {"call": "scores_of_mine:length", "minimum": 14}})
    assert documents(build_corpus(asked, ByteTokenizer())) == ["an apple a day", "nothing at all"]


def test_a_function_may_give_numbers_that_are_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are within no bounds, and JSON has none of them."""
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "def odd(text):\n    return float(text.split()[0])\n"
    (tmp_path / "odd_scores.py").write_text(code)
    file = lines(tmp_path / "a.jsonl", ["nan a", "inf b", "7 c"])
    keys = {"function": {"call": "odd_scores:odd", "maximum": 9}}
    corpus = build_corpus(config(file, filters=keys), ByteTokenizer())
    assert documents(corpus) == ["7 c"]
    assert {row.why for row in examples_of(dropped(corpus))} == {
        "function: what is no finite number is beyond maximum"
    }


@pytest.mark.parametrize(
    ("file", "folder"),
    [
        ("signature.bin", r"quality-\w+/data/\w+"),
        ("values.bin", r"scratch/\w+/copies"),
        ("same.bin", r"quality-\w+"),
    ],
)
def test_a_full_disk_is_the_machines_fault_and_what_was_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, folder: str
) -> None:
    plain = Path.open

    def full(path: Path, mode: str = "r", **more: Any) -> Any:
        if path.name == file and mode == "wb":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return plain(path, mode, **more)

    monkeypatch.setattr(Path, "open", full)
    section = config(lines(tmp_path / "c.jsonl", TEXTS[:3]), dedup=Dedup.minhash)
    with pytest.raises(TrainctlError, match=f"{folder}: No space left on device") as caught:
        build_corpus(section, ByteTokenizer())
    assert caught.value.exit_code is ExitCode.environment
    kept = list(tmp_path.glob("cache/quality-*/..duplicates.scratch/*/table.json"))
    assert len(kept) == (file != "signature.bin")


def test_the_same_in_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file is a task here; two tasks with the same content stay two."""
    monkeypatch.setattr(tasks, "TASK_BYTES", 1)
    for folder in (tmp_path / "c", tmp_path / "c" / "x"):
        for number in range(3):
            lines(folder / f"{number}.jsonl", TEXTS[5 * number : 5 * number + 5])
    asked, section = config(tmp_path / "c", dedup=Dedup.exact), new_section("tokenizer", "byte")
    alone = build_corpus(asked, ByteTokenizer())
    assert documents(alone) == TEXTS[:15] and reasons(alone) == {"exact": 15}
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "another"))
    together = build_corpus(asked, ByteTokenizer(), tokenizer_section=section, workers=2)
    assert together.digest == alone.digest


def test_a_source_of_a_mixture_is_tokenized_in_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "TASK_BYTES", 1)
    for number in range(2):
        lines(tmp_path / "a" / f"{number}.jsonl", TEXTS[5 * number : 5 * number + 5])
    asked = "data.sources={a: {paths: [a], weight: 1, held_out_fraction: 0}}"
    whole = compose([asked, "data.dedup=exact"]).config.data
    section = new_section("tokenizer", "byte")
    made = build_corpus(
        whole.sources["a"],
        ByteTokenizer(),
        tokenizer_section=section,
        workers=2,
        run_data=whole,
        name="a",
    )
    assert documents(made) == TEXTS[:10]
