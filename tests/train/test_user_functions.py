"""Functions of the user's: imported, called, and blamed by file and line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from trainctl.config.schema import DataConfig, ModelConfig
from trainctl.data.corpus import build_users_corpus
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.data.user_functions import load_user_function
from trainctl.errors import ExitCode, TrainctlError
from trainctl.train.models.model import skeleton

OWN = """
calls = []
value = 3
def texts(config, split):
    calls.append(split)
    yield f"text of {split} " * 50
def numbers(config, split):
    yield 3
def no_model(shape):
    return shape
def fails(config, split):
    yield "one"
    raise KeyError("two")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_code.py").write_text(OWN)
    (tmp_path / "broken_code.py").write_text("import json\n\nvalue = 1 / 0\n")
    yield tmp_path
    for name in ("own_code", "broken_code"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("own_code:nothing", "own_code.py has no nothing"),
        ("own_code:value", "holds a value: value"),
        ("not_there:f", "No module named 'not_there'"),
        ("broken_code:f", "ZeroDivisionError: division by zero ("),
    ],
)
def test_what_cannot_be_imported(own: Path, reference: str, message: str) -> None:
    with pytest.raises(TrainctlError) as caught:
        load_user_function("trainer", reference)
    assert f"trainer={reference}" in caught.value.message and message in caught.value.message
    if "broken" in reference:
        assert caught.value.message.endswith(f"({own}/broken_code.py:3)")


def test_the_text_is_kept_with_the_run(own: Path) -> None:
    config, folder = DataConfig(factory="own_code:texts"), own / "corpus"
    corpus = build_users_corpus(config, ByteTokenizer(), folder)
    assert corpus.train.documents == corpus.held_out.documents == 1
    text = bytes(corpus.tokens(corpus.held_out)[:16].astype("u1")).decode()
    assert text == "text of held_out"
    calls = sys.modules["own_code"].calls
    assert calls == ["held_out", "train"]
    moved = own / "moved"
    folder.rename(moved)
    again = build_users_corpus(config, ByteTokenizer(), moved)
    assert calls == ["held_out", "train"], "it is not asked again"
    assert (again.digest, again.folder) == (corpus.digest, str(moved))
    assert (again.tokens(again.train) == again.tokens(again.train)).all()


def test_a_model_is_one_of_transformers(own: Path) -> None:
    with pytest.raises(TrainctlError, match="gave a ModelConfig") as caught:
        skeleton(ModelConfig(factory="own_code:no_model"), torch.float32)
    assert "PreTrainedModel" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "message"),
    [("numbers", "expected texts, got int"), ("fails", "KeyError: 'two' (")],
)
def test_a_function_that_fails_is_named_with_its_line(own: Path, name: str, message: str) -> None:
    with pytest.raises(TrainctlError, match="held_out split") as caught:
        build_users_corpus(DataConfig(factory=f"own_code:{name}"), ByteTokenizer(), own / "corpus")
    assert message in caught.value.message
    assert caught.value.exit_code is ExitCode.training_failed
    if name == "fails":
        assert caught.value.message.endswith("own_code.py:13)")
    assert not (own / "corpus").exists()
