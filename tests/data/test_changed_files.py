"""A corpus that is not the run's names the file that has changed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from trainctl.config.registry import new_section
from trainctl.data.corpora import require_unchanged_corpora, save_corpora
from trainctl.data.corpus import Corpus, build_corpus
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import RunStateError
from trainctl.plans.mixture import SINGLE_SOURCE


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def write(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def problem(folder: Path, built: Corpus, **changes: object) -> str:
    """Return the error of a run on `built` whose files are as they are now."""
    record = folder / "corpus.json"
    if not record.exists():
        save_corpora(record, {SINGLE_SOURCE: built})
        os.utime(record, (1e9, 1e9))
    section = new_section("data", "files", paths=[str(folder / "texts")], **changes)
    now = build_corpus(section, ByteTokenizer(), workers=1)
    with pytest.raises(RunStateError, match="not the one that this run started with") as error:
        require_unchanged_corpora({SINGLE_SOURCE: now}, record, section)
    return error.value.message.partition("started with: ")[2]


def made(folder: Path, **changes: object) -> Corpus:
    (folder / "texts").mkdir()
    for name in "abc":
        write(folder / "texts" / f"{name}.jsonl", [f"{name} {number:02}" for number in range(40)])
    section = new_section("data", "files", paths=[str(folder / "texts")], **changes)
    return build_corpus(section, ByteTokenizer(), workers=1)


def test_a_changed_corpus_names_the_file(tmp_path):
    built, texts = made(tmp_path), tmp_path / "texts"
    write(texts / "b.jsonl", [f"b {number:02}" for number in range(39)])
    said = problem(tmp_path, built)
    assert said == f"{texts}/b.jsonl has 39 documents of 195 tokens, and had 40 of 200"
    write(texts / "c.jsonl", [f"c {number:02}" for number in range(41)])
    assert problem(tmp_path, built) == f"{said}, and 1 more files differ"
    (texts / "a.jsonl").unlink()
    assert problem(tmp_path, built).startswith(f"{texts}/a.jsonl is gone, and 2 more")


def test_other_text_of_one_length_is_named_by_its_line(tmp_path):
    built, texts = made(tmp_path, held_out_fraction=0.0), tmp_path / "texts"
    write(
        texts / "b.jsonl", [f"b {'xx' if number == 30 else f'{number:02}'}" for number in range(40)]
    )
    said = problem(tmp_path, built, held_out_fraction=0.0)
    assert said == f"{texts}/b.jsonl:31 has other text"


def test_a_file_written_since_is_named_where_the_old_tokens_are_gone(tmp_path):
    built, texts = made(tmp_path), tmp_path / "texts"
    shutil.rmtree(built.folder)
    for file in texts.iterdir():
        os.utime(file, (9e8, 9e8))
    write(texts / "b.jsonl", ["b"])
    assert problem(tmp_path, built) == f"{texts}/b.jsonl was written after the run had read it"
