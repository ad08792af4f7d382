"""Held-out data are chosen by record, as a function of seed and record alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from chat_files import asked, write_tokenizer

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import DataConfig, HeldOutBy, RunConfig
from trainctl.config.store import load_config
from trainctl.data.corpus import Corpus, CorpusBuilder, build_corpus
from trainctl.data.document_selection import selection_digest
from trainctl.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from trainctl.readers.check import check_text
from trainctl.readers.documents import Reader, split_documents
from trainctl.readers.files import split_files
from trainctl.runs.directory import read_plan

RECORDS = 240
FORMER = Path(__file__).parents[1] / "runs" / "former_run" / "run"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def rows_of(kind: str) -> list[dict]:
    numbers = range(RECORDS)
    if kind == "chat":
        return [{"messages": asked((f"q{n}", f"a{n};"))} for n in numbers]
    if kind == "preferences":
        return [{"prompt": f"q{n}", "chosen": f"a{n};", "rejected": f"b{n};"} for n in numbers]
    if kind == "labelled":
        return [{"text": f"q{n} a{n};", "label": n % 2} for n in numbers]
    return [{"text": f"q{n} a{n};"} for n in numbers]


def written(folder: Path, kind: str, files: int) -> list[str]:
    """Write the records of a kind into files of equal length, and return their paths."""
    folder.mkdir()
    rows, ending = rows_of(kind), {"parquet": "parquet", "csv": "csv"}.get(kind, "jsonl")
    paths = [folder / f"{number}.{ending}" for number in range(files)]
    for number, path in enumerate(paths):
        own = rows[number * len(rows) // files : (number + 1) * len(rows) // files]
        if kind == "parquet":
            arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
            parquet.write_table(arrow.Table.from_pylist(own), path)
        elif kind == "csv":
            path.write_text("text\n" + "".join(f"{row['text']}\n" for row in own))
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in own))
    return [str(path) for path in paths]


def numbers(corpus: Corpus, split: str, tokenizer: Tokenizer) -> set[int]:
    """Return the numbers of the records of a split."""
    text = tokenizer.decode(np.asarray(corpus.tokens(getattr(corpus, split))[:]).tolist())
    return {int(part.rpartition("a")[2]) for part in text.split(";")[:-1] if "a" in part}


@pytest.mark.parametrize("kind", ["chat", "preferences", "labelled", "files", "csv", "parquet"])
def test_held_out_records_come_from_every_file(tmp_path, kind):
    tokenizer = FileTokenizer(write_tokenizer(tmp_path / "tokenizer") / "tokenizer.json")
    found = []
    for files in (1, 2, 5):
        paths = written(tmp_path / f"in-{files}", kind, files)
        section = new_section("data", kind, paths=paths, held_out_fraction=0.1)
        corpus = build_corpus(section, tokenizer, workers=1)
        assert corpus.train.documents + corpus.held_out.documents == RECORDS
        found.append(numbers(corpus, "held_out", tokenizer))
    assert 10 <= len(found[0]) <= 40 and found[0] == found[1] == found[2]
    assert min(found[0]) < RECORDS // 2 <= max(found[0]), "records of both files"


def test_another_seed_holds_out_other_records_and_one_process_the_same(tmp_path):
    paths = written(tmp_path / "in", "files", 3)
    every = []
    for seed in (0, 1, 2):
        section = new_section("data", "files", paths=paths, held_out_seed=seed)
        corpus = build_corpus(section, ByteTokenizer(), workers=1)
        every.append(numbers(corpus, "held_out", ByteTokenizer()))
        section.max_bytes = 1 << 20  # read by one process
        alone = [
            int(document.text.rpartition("a")[2][:-1])
            for side, document in split_documents(section, split_files(section), Reader(section))
            if side == "held_out"
        ]
        assert {*alone} == every[-1] and 2 <= len(alone) <= 30
    assert not every[0] & every[1] & every[2] and len(every[0] | every[1] | every[2]) > 12


def test_the_seed_is_part_of_what_is_cached(tmp_path):
    paths = written(tmp_path / "in", "files", 2)
    keys = set()
    for fields in ({}, {"held_out_seed": 1}, {"held_out_by": HeldOutBy.file}):
        section = new_section("data", "files", paths=paths, **fields)
        builder = CorpusBuilder(config=section, tokenizer=ByteTokenizer(), run_data=section)
        files = {"data": (section, split_files(section))}
        keys |= {builder.folder.name, selection_digest(section, files)}
    assert len(keys) == 6


def test_of_each_file_of_ids_the_last_documents_are_held_out(tmp_path):
    for number in range(2):
        ids = np.concatenate([[number, n, 256] for n in range(100)]).astype("<u2")
        ids.tofile(tmp_path / f"{number}.bin")
    config = from_plain(
        DataConfig, {"kind": "tokens", "id_type": "uint16", "paths": [str(tmp_path)]}
    )
    corpus = build_corpus(config, ByteTokenizer(), workers=1)
    held_out = np.asarray(corpus.tokens(corpus.held_out)[:]).reshape(-1, 3)[:, :2].tolist()
    assert held_out == [[number, n] for number in range(2) for n in range(95, 100)]


def test_few_documents_are_held_out_with_a_warning(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"{name} text " * 2000)
    config = RunConfig()
    config.data = new_section("data", "files", paths=[str(tmp_path)])
    (finding,) = check_text(config)
    assert (
        finding.rule == "TC141" and "1 of 2 files held out are 50% of the text" in finding.message
    )


@pytest.mark.parametrize("changes", [{}, {"sources": {"a": {"kind": "files", "paths": ["x"]}}}])
def test_a_run_of_before_goes_on_to_hold_out_whole_files(tmp_path, changes):
    plain = yaml.safe_load((FORMER / "config.yaml").read_text())
    plain["data"] |= changes
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    data = load_config(tmp_path / "config.yaml").data
    for section in (data, *data.sources.values()):
        assert section.held_out_by is HeldOutBy.file
    assert (
        read_plan(FORMER / "attempts" / "1" / "plan.json").config.data.held_out_by is HeldOutBy.file
    )
    now = to_plain(RunConfig())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(now))
    assert load_config(tmp_path / "config.yaml").data.held_out_by is HeldOutBy.record


def test_whole_files_are_held_out_if_asked_for(tmp_path):
    paths = written(tmp_path / "in", "files", 4)
    section = new_section("data", "files", paths=paths, held_out_by=HeldOutBy.file)
    files = split_files(section)
    assert len(files.train) == 3 and len(files.held_out) == 1
