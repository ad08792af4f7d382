"""Targets: what is stored beside a record, and where it is again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainctl.config.registry import new_section
from trainctl.data import task_workers, tasks
from trainctl.data.cache_files import cache_folder
from trainctl.data.corpora import load_corpora, save_corpora
from trainctl.data.corpus import CorpusBuilder, build_corpus
from trainctl.data.corpus_record import Corpus
from trainctl.data.store import TokenStore
from trainctl.data.targets import NO_TARGETS, TargetLayout, name_targets
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import TrainctlError
from trainctl.plans.mixture import SINGLE_SOURCE


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pairs(path: Path, margins: list[float | None]) -> Path:
    base = {"chosen": "yes", "rejected": "no"}
    return written(path, [{**base, "prompt": f"{n}?", "margin": m} for n, m in enumerate(margins)])


def built(file: Path, **changes) -> Corpus:
    section = new_section("data", "preferences", paths=[str(file)], **changes)
    return build_corpus(section, ByteTokenizer(), workers=1)


def test_targets_stand_beside_the_records_they_belong_to(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "TASK_BYTES", 200)
    margins = [None if n % 3 == 0 else n / 4 for n in range(40)]
    corpus = built(pairs(tmp_path / "pairs.jsonl", margins), held_out_fraction=0.3)
    assert len([*cache_folder().rglob("targets.bin")]) > 1
    found = {}
    for split in (corpus.train, corpus.held_out):
        ends, rows = corpus.ends(split).astype(int), corpus.targets(split)
        assert rows.shape == (split.documents, 1)
        for start, end, row in zip([0, *ends[:-1]], ends, rows, strict=True):
            text = ByteTokenizer().decode(corpus.tokens(split)[start:end].tolist())
            found[int(text.partition("?")[0])] = name_targets(row, corpus.classes)
    assert found == {n: [] if m is None else [m] for n, m in enumerate(margins)}


def test_a_corpus_without_targets_is_as_before_and_targets_are_part_of_the_digest(tmp_path):
    without = built(pairs(tmp_path / "none.jsonl", [None] * 4), held_out_fraction=0.0)
    one, other = (
        built(pairs(tmp_path / f"{margin}.jsonl", [margin] * 4), held_out_fraction=0.0)
        for margin in (1, 2)
    )
    assert len({each.digest for each in (without, one, other)}) == 3
    kept = json.loads((Path(without.folder) / "corpus.json").read_text())
    names = {*kept, *kept["train"], *kept["held_out"]}
    assert not {name for name in names if "target" in name or name == "classes"}
    assert without.targets(without.train) is None
    assert not (Path(without.folder) / "train.targets").exists()
    save_corpora(tmp_path / "corpus.json", {SINGLE_SOURCE: one})
    section = new_section("data", "preferences", paths=["x"])
    assert load_corpora(tmp_path / "corpus.json", section) == {SINGLE_SOURCE: one}


def test_damaged_targets_are_found_and_made_again(tmp_path):
    file = pairs(tmp_path / "pairs.jsonl", [1, 2, 3])
    corpus = built(file, held_out_fraction=0.0)
    whole = corpus.targets(corpus.train).copy()
    for damaged in (Path(corpus.folder) / "train.targets", *cache_folder().rglob("targets.bin")):
        raw = damaged.read_bytes()
        damaged.write_bytes(raw[:-1] + b"\x01")
        again = built(file, held_out_fraction=0.0)
        assert again.digest == corpus.digest
        assert np.array_equal(again.targets(again.train), whole)
        if damaged.name == "targets.bin":
            continue
        assert damaged.read_bytes() == raw
    section = new_section("data", "preferences", paths=[str(file)], held_out_fraction=0.0)
    builder = CorpusBuilder(
        config=section, tokenizer=ByteTokenizer(), run_data=section, notify=lambda _: None
    )
    store, of_store = builder._store_and_tasks
    assert isinstance(store, TokenStore)
    task_workers.run_tasks(store, of_store)
    with pytest.raises(Exception, match=r"targets\.bin has another size or checksum"):
        store.part(of_store[0]).target_rows()


def test_names_of_classes_are_numbered_over_all_parts():
    first = TargetLayout.of([["b"], [], ["d", "b"]])
    second = TargetLayout.of([["a"]])
    layout = TargetLayout.joined([first, second, NO_TARGETS])
    assert layout == TargetLayout(2, ("a", "b", "d"))
    rows = layout.align(first.to_array([["b"], [], ["d", "b"]]), first)
    assert [name_targets(row, layout.classes) for row in rows] == [["b"], [], ["d", "b"]]
    assert rows[2].tolist() == [2.0, 1.0]
    assert layout.align(second.to_array([["a"]]), second)[0, 0] == 0
    assert TargetLayout.joined([first], ["d", "c", "b"]).classes == ("d", "c", "b")
    assert TargetLayout.of([["10"], ["2"]]).classes == ("2", "10")
    numbers = TargetLayout.of([[0.5]])
    for make in (
        lambda: TargetLayout.joined([first, numbers]),
        lambda: TargetLayout.of([["a", 1]]),
    ):
        with pytest.raises(TrainctlError, match=r"some labels are names .* and some are numbers"):
            make()
