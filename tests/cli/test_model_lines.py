"""Tests of what commands say about a model from a directory and about a default sequence length."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.config.schema import ModelConfig
from trainctl.errors import ExitCode
from trainctl.plans.shapes import all_tensors

SHAPE = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Write a llama directory with zero weights and a tokenizer, and return it."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    vocabulary = {"a": 0, "b": 1, "[EOS]": 2}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    model = ModelConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_layers=2, num_attention_heads=4
    )
    header, end = {}, 0
    for tensor in all_tensors(model):
        start, end = end, end + 2 * tensor.numel
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return tmp_path


def words(folder: Path) -> list[str]:
    model = ["model=hf", f"model.path={folder}", "tokenizer=hf", f"tokenizer.path={folder}"]
    return ["recipe=tiny", *model]


def test_the_plan_says_where_weights_and_ends_of_documents_come_from(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "--dry-run", *words(directory)]) == 0
    shown = capsys.readouterr().out
    assert f"weights   of {directory} at step 0" in shown
    assert "3 of 320 ids, [EOS] (2) ends a document, by its name" in shown
    assert run(["launch", "--dry-run", *words(directory), "model.weights=random"]) == 0
    assert "weights   random at step 0, by training.seed=" in capsys.readouterr().out
    assert run(["launch", "--dry-run", "recipe=tiny"]) == 0
    assert "tokenizer byte: 257 of 264 ids, id 256 ends a document" in capsys.readouterr().out


def test_files_that_a_rank_would_fail_on_are_reported_before(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    (directory / "tokenizer_config.json").write_text("{")
    assert run(["validate", *words(directory)]) == ExitCode.bad_input
    told = capsys.readouterr().err
    assert f"{path} has" in told and f"{directory / 'tokenizer_config.json'} is no JSON" in told
    path.write_bytes(whole)
    (directory / "tokenizer_config.json").unlink()
    (directory / "config.json").write_text(json.dumps(SHAPE | {"intermediate_size": 100}))
    assert run(["validate", *words(directory)]) == ExitCode.bad_input
    assert "mlp.gate_proj.weight is [96, 64] in model.safetensors" in capsys.readouterr().err


def test_memory_needs_no_length_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["model=llama-7b", "hardware=8xh100-80g", "zero_stage=3"]
    assert run(["estimate-memory", *asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert run(["estimate-memory", *asked, "training.steps=10", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert run(["validate", *asked]) == ExitCode.bad_input


def test_estimate_memory_reports_no_missing_training_length(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["model=hf", f"model.path={directory}", "hardware=2xcpu"]
    assert run(["estimate-memory", *asked, "optimizer.lr=-1"]) == ExitCode.bad_input
    told = capsys.readouterr().err
    assert "optimizer.lr" in told and "training.steps" not in told
