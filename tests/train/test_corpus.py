"""The corpus: which files, how they are split, what is written, and what is refused."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from trainctl.config.schema import DataConfig, DataKind
from trainctl.errors import TrainctlError
from trainctl.train.corpus import build_corpus, split_files
from trainctl.train.tokenizer import ByteTokenizer


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for index in range(20):
        (folder / f"{index}.txt").write_text(f"document {index}\n" * 5)
    (folder / "deep" / "lines.jsonl").write_text(
        json.dumps({"text": "first"}) + "\n\n" + json.dumps({"text": "second", "other": 1}) + "\n"
    )
    return folder


def files_config(texts, **fields):
    return DataConfig(kind=DataKind.files, paths=[str(texts / "**" / "*.*")], **fields)


def test_the_standard_library_is_there_and_its_tests_are_not():
    train, held_out = split_files(DataConfig())
    assert len(train) > 100 and len(held_out) > 5
    assert not set(train) & set(held_out)
    assert all("site-packages" not in file.parts and "test" not in file.parts for file in train)


def test_a_file_is_on_the_same_side_wherever_the_folder_is_and_whatever_is_added(texts, tmp_path):
    _train, held_out = split_files(files_config(texts, held_out_fraction=0.2))
    assert len(held_out) == round(21 * 0.2)
    moved = tmp_path / "moved"
    texts.rename(moved)
    names = {file.name for file in split_files(files_config(moved, held_out_fraction=0.2))[1]}
    assert names == {file.name for file in held_out}


def test_tokens_are_the_documents_in_order_each_closed(texts):
    corpus = build_corpus(files_config(texts, held_out_fraction=0.0), ByteTokenizer())
    expected = b""
    ids: list[int] = []
    for file in sorted(texts.rglob("*.*")):
        documents = ["first", "second"] if file.suffix == ".jsonl" else [file.read_text()]
        for text in documents:
            ids += [*text.encode(), 256]
            expected += text.encode()
    assert corpus.tokens(corpus.train).tolist() == ids
    assert corpus.train.documents == 22 and corpus.held_out.tokens == 0
    counts = Counter(ids)
    entropy = -sum(c / len(ids) * math.log(c / len(ids)) for c in counts.values())
    assert corpus.unigram_entropy == pytest.approx(entropy, rel=1e-12)


def test_the_cache_is_used_until_a_file_changes(texts):
    config = files_config(texts)
    calls = []
    first = build_corpus(config, ByteTokenizer(), calls.append)
    assert len(calls) == 22
    assert build_corpus(config, ByteTokenizer(), calls.append) == first
    assert len(calls) == 22
    (texts / "3.txt").write_text("changed")
    second = build_corpus(config, ByteTokenizer(), calls.append)
    assert len(calls) == 44 and second.digest != first.digest


def test_max_bytes_cuts_the_text(texts):
    corpus = build_corpus(files_config(texts, max_bytes=100, held_out_fraction=0), ByteTokenizer())
    ids = corpus.tokens(corpus.train)
    assert (np.asarray(ids) != 256).sum() == 100


@pytest.mark.parametrize(
    ("content", "message"),
    [('{"body": "x"}', "no text under 'text'"), ("{broken", "not JSONL"), ("[1]", "no text under")],
)
def test_a_broken_jsonl_names_the_file(texts, content, message):
    (texts / "bad.jsonl").write_text(content + "\n")
    with pytest.raises(TrainctlError, match=message) as caught:
        build_corpus(files_config(texts), ByteTokenizer())
    assert "bad.jsonl" in caught.value.message


def test_a_glob_without_files_says_which(tmp_path):
    config = DataConfig(kind=DataKind.files, paths=[str(tmp_path / "none" / "*.txt")])
    with pytest.raises(TrainctlError, match=r"data\.paths: no file matches"):
        build_corpus(config, ByteTokenizer())
