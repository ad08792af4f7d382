"""Tests of special tokens read from tokenizer files, and of faulty files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trainctl.errors import TrainctlError
from trainctl.models.tokenizer_files import END_NAMES, read_chat_template, read_facts


def tokenizer(folder: Path, *tokens: str, **content: Any) -> Path:
    path = folder / "tokenizer.json"
    vocabulary = {token: number for number, token in enumerate(["a", "b", *tokens])}
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocabulary}, **content}))
    return path


@pytest.mark.parametrize("name", END_NAMES)
def test_a_known_name_ends_documents(tmp_path: Path, name: str) -> None:
    facts = read_facts(tokenizer(tmp_path, "c", name))
    assert (facts.vocab_size, facts.end_of_document, facts.end_token) == (4, 3, name)


def test_the_settings_come_before_the_model_and_the_model_before_names(tmp_path: Path) -> None:
    path = tokenizer(tmp_path, "</s>", "<one>", "<two>", "<three>")
    assert read_facts(path).end_token == "</s>"
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert read_facts(path).end_token == "<one>"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 3]}))
    assert read_facts(path).end_token == "<two>"
    settings = {"eos_token": {"content": "<three>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    facts = read_facts(path)
    assert (facts.end_token, facts.end_of_document) == ("<three>", 5)
    assert facts.describe(512).endswith("by eos_token of tokenizer_config.json")


def test_ids_with_gaps_need_rows_for_the_largest(tmp_path: Path) -> None:
    added = [{"id": 900, "content": "<far>"}]
    assert read_facts(tokenizer(tmp_path, added_tokens=added)).vocab_size == 901


def test_unigram_vocabularies_are_lists(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}))
    assert read_facts(path).end_of_document == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "no JSON"),
        ("tokenizer.json", b"\xff{}", "not UTF-8 at byte 0"),
        ("tokenizer.json", b"[" * 100_000, "no JSON that can be read"),
        ("tokenizer.json", b"[]", "holds no JSON object"),
        ("tokenizer.json", b"{}", "model.vocab is missing"),
        ("tokenizer.json", b'{"model": {"vocab": {}}}', "has no tokens"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": -3}}}', "the id -3"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 0}}, "added_tokens": [7]}', "added_tokens"),
        (
            "tokenizer.json",
            b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 999999999, "content": "b"}]}',
            "gives 'b' the id 999,999,999, and has 2 tokens",
        ),
        ("tokenizer_config.json", b"{", "no JSON"),
        ("tokenizer_config.json", b"[1]", "holds no JSON object"),
        ("tokenizer_config.json", b'{"eos_token": "<none>"}', "which tokenizer.json lacks"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    path = tokenizer(tmp_path, "</s>")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TrainctlError, match=words) as caught:
        read_facts(path)
    assert str(tmp_path / name) in caught.value.message


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "template.jinja"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(TrainctlError, match="is no regular file"):
        read_facts(tmp_path / "tokenizer.json")
    with pytest.raises(TrainctlError, match="is no regular file"):
        read_chat_template(tmp_path / "tokenizer.json", str(tmp_path / "template.jinja"))
