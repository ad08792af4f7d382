"""Tokenizers: bytes, and a real file of the tokenizers library made on the spot."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from trainctl.config.registry import new_section
from trainctl.data.tokenizer import ByteTokenizer, load_tokenizer
from trainctl.errors import TrainctlError


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.tolist() == list(text.encode("utf-8", errors="surrogateescape"))
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_decode_replaces_what_is_not_text_and_drops_the_end_of_document():
    assert ByteTokenizer().decode([104, 105, 256, 0xFF]) == "hi�"


def _write_tokenizer(folder):
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>", "</s>", "<stop>"])
    backend.train_from_iterator(["the cat sat on the mat and the cat sat"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    return backend


def test_a_tokenizer_file_and_directory_give_the_librarys_ids(tmp_path):
    backend = _write_tokenizer(tmp_path)
    file = load_tokenizer(new_section("tokenizer", "file", path=str(tmp_path / "tokenizer.json")))
    assert file.encode("the cat").tolist() == backend.encode("the cat").ids
    texts = ["the cat", "", "on the mat", "a dog"]
    assert [ids.tolist() for ids in file.encode_all(texts)] == [
        backend.encode(text).ids for text in texts
    ]
    assert file.vocab_size == backend.get_vocab_size()
    assert file.end_of_document == backend.token_to_id("</s>")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<stop>"}})
    )
    folder = load_tokenizer(new_section("tokenizer", "hf", path=str(tmp_path)))
    assert folder.end_of_document == backend.token_to_id("<stop>")
    assert folder.fingerprint != file.fingerprint, "the same text gets another end"


@pytest.mark.parametrize("content", [None, "not json", "{}"])
def test_a_missing_or_wrong_file_is_one_clear_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrainctlError, match=r"tokenizer\.path"):
        load_tokenizer(new_section("tokenizer", "file", path=str(path)))
