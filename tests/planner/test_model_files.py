"""Weights and tokenizers held against the model by their files alone."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig, RunConfig, TokenizerFromPath
from trainctl.plan.disk_names import parts_of
from trainctl.plan.shapes import all_tensors
from trainctl.planner.model_files import check_model_files
from trainctl.planner.tokenizer_files import check_tokenizer_files

SHAPES = {tensor.name: tensor.shape for tensor in all_tensors(ModelConfig())}


def save(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F8_E4M3") -> None:
    """A file with that header, and as many bytes as it speaks of."""
    width = {"F8_E4M3": 1, "BF16": 2}[dtype]
    header, end = {}, 0
    for name, shape in shapes.items():
        start, size = end, width
        for length in shape:
            size *= length
        end = start + size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def config(folder: Path, **model: Any) -> RunConfig:
    made = RunConfig()
    made.model = ModelConfig(initial_weights=str(folder), **model)
    return made


def test_weights_that_are_the_models_are_no_finding(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", SHAPES, "BF16")
    assert check_model_files(config(tmp_path)) == []
    half = len(SHAPES) // 2
    names = list(SHAPES)
    (tmp_path / "model.safetensors").unlink()
    files = {"a.safetensors": names[:half], "b.safetensors": names[half:]}
    for file, held in files.items():
        save(tmp_path / file, {name: SHAPES[name] for name in held}, "BF16")
    index = {name: file for file, held in files.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert check_model_files(config(tmp_path)) == []


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"model.norm.weight": None}, "TC148", "1 of its tensors are not there: model.norm.weight"),
        ({"model.norm.weight": (64,)}, "TC148", r"model.norm.weight is [64] in model.safetensors"),
        ({"vision.weight": (3, 3)}, "TC149", "1 tensors of"),
        ({"model.layers.0.mlp.gate.e_score_correction_bias": (4,)}, "TC148", "a state of its rout"),
    ],
)
def test_each_difference_is_told(tmp_path: Path, change: Any, rule: str, words: str) -> None:
    shapes = {k: v for k, v in (SHAPES | change).items() if v is not None}
    save(tmp_path / "model.safetensors", shapes, "BF16")
    (found,) = check_model_files(config(tmp_path))
    assert found.rule == rule and words in found.message
    assert found.is_error == (rule == "TC148")


def test_quantised_and_broken_files_are_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, SHAPES)
    (found,) = check_model_files(config(tmp_path))
    assert "quantised weights are not read" in found.message
    save(path, SHAPES, "BF16")
    whole = path.read_bytes()
    for broken, words in (
        (whole[:-1], "cut short"),
        (b"", "no safetensors file"),
        (struct.pack("<Q", 10) + b"[" * 10, "no safetensors header"),
        (struct.pack("<Q", 1 << 62), "no safetensors file"),
    ):
        path.write_bytes(broken)
        (found,) = check_model_files(config(tmp_path))
        assert words in found.message and str(path) in found.message
    path.unlink()
    outside = {"weight_map": {"a": "../b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(outside))
    (found,) = check_model_files(config(tmp_path))
    assert "not in its own directory" in found.message


@pytest.mark.parametrize(
    ("gate", "up", "down", "router"),
    [
        (
            "mlp.experts.{e}.gate_proj",
            "mlp.experts.{e}.up_proj",
            "mlp.experts.{e}.down_proj",
            "mlp",
        ),
        (
            "block_sparse_moe.experts.{e}.w1",
            "block_sparse_moe.experts.{e}.w3",
            "block_sparse_moe.experts.{e}.w2",
            "block_sparse_moe",
        ),
    ],
)
def test_published_experts_are_found_under_their_own_names(
    tmp_path: Path, gate: str, up: str, down: str, router: str
) -> None:
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": (2, 6, 4),
        "model.layers.0.mlp.experts.down_proj": (2, 4, 3),
        "model.layers.0.mlp.gate.weight": (2, 4),
    }
    fused_table = [f"{name} {'x'.join(map(str, shape))} weight" for name, shape in fused.items()]
    stored = {f"model.layers.0.{router}.gate.weight": (2, 4)}
    for expert in range(2):
        for pattern, shape in ((gate, (3, 4)), (up, (3, 4)), (down, (4, 3))):
            stored[f"model.layers.0.{pattern.format(e=expert)}.weight"] = shape
    save(tmp_path / "model.safetensors", stored, "BF16")
    model = {"family": "hf", "path": "x", "anatomy": fused_table}
    assert check_model_files(config(tmp_path, **model)) == []
    parts = parts_of("model.layers.0.mlp.experts.gate_up_proj", (2, 6, 4), stored)
    words = [part.name.rsplit(".", 3)[1:3] for part in parts]
    assert words == [["0", parts[0].name.split(".")[-2]], ["0", parts[1].name.split(".")[-2]]] + [
        ["1", word] for _, word in words[:2]
    ]
    assert parts_of("model.layers.0.mlp.experts.gate_up_proj", (3, 6, 4), stored) == ()


def tokenizer(folder: Path, *tokens: str) -> TokenizerFromPath:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    found: TokenizerFromPath = new_section("tokenizer", "hf", path=str(folder))
    return found


def test_a_tokenizer_is_held_against_the_vocabulary(tmp_path: Path) -> None:
    made = RunConfig()
    made.tokenizer = tokenizer(tmp_path, *map(str, range(600)), "</s>")
    (found,) = check_tokenizer_files(made)
    assert (found.rule, found.hint) == ("TC157", "model.vocab_size=640")
    made.model.vocab_size = 640
    assert check_tokenizer_files(made) == []
    (tmp_path / "tokenizer_config.json").write_text("{")
    (found,) = check_tokenizer_files(made)
    assert found.rule == "TC156" and "tokenizer_config.json" in found.message


def test_no_end_of_document_is_told_and_documents_can_be_masked(tmp_path: Path) -> None:
    made = RunConfig()
    made.tokenizer = tokenizer(tmp_path, "a", "b")
    (found,) = check_tokenizer_files(made)
    assert found.rule == "TC154" and not found.is_error
    made.data.mask_documents = True  # the corpus knows where each of them ends
    assert check_tokenizer_files(made) == [found]


def test_bytes_for_weights_that_know_other_ids_are_told(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert check_tokenizer_files(made) == []
    tokenizer(tmp_path, "a", "</s>")
    (found,) = check_tokenizer_files(made)
    assert found.hint == f"tokenizer=hf tokenizer.path={tmp_path}" and not found.is_error
