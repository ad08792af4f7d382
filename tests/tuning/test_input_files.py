"""Weights and tokenizers held against the model by their files alone."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from trainctl.config.registry import new_section
from trainctl.config.schema import ModelConfig, RunConfig, TokenizerFromPath
from trainctl.models import tracing
from trainctl.plans.shapes import all_tensors
from trainctl.tuning.input_files import (
    _compare_by_transformers,
    check_model_files,
    check_tokenizer_files,
)

SHAPES = {tensor.name: tensor.shape for tensor in all_tensors(ModelConfig())}


def save(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "F8_E4M3") -> None:
    """Write a safetensors file with these shapes, sparse and of the right size."""
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


def test_a_checkpoint_that_its_run_may_remove_is_no_base_to_rely_on(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00000004"
    copied = tmp_path / "copied"
    for each in (folder, copied):
        each.mkdir(parents=True)
        (each / "manifest.json").write_text("{}")
    for place, count in ((folder, 1), (tmp_path / "run", 1), (copied, 0)):
        made = config(place)
        assert check_model_files(made) == [], "all of it is in the run's own checkpoints"
        made.adapter = new_section("adapter", "lora")
        findings = check_model_files(made)
        assert [each.rule for each in findings] == ["TC371"] * count
        assert all(f"{tmp_path / 'run'}, which" in each.message for each in findings)
        assert not any(each.is_error for each in findings)


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"model.norm.weight": None}, "TC148", "1 of its tensors are not there: model.norm.weight"),
        ({"model.norm.weight": (64,)}, "TC148", r"model.norm.weight is [64] in model.safetensors"),
        ({"vision.weight": (3, 3)}, "TC149", "1 tensors of"),
        ({"model.layers.0.mlp.gate.e_score_correction_bias": (4,)}, "TC149", "1 tensors of"),
    ],
)
def test_each_difference_is_reported(tmp_path: Path, change: Any, rule: str, words: str) -> None:
    shapes = {k: v for k, v in (SHAPES | change).items() if v is not None}
    save(tmp_path / "model.safetensors", shapes, "BF16")
    (found,) = check_model_files(config(tmp_path))
    assert found.rule == rule and words in found.message
    assert found.is_error == (rule == "TC148")


def test_weights_with_the_head_of_another_task_are_refused(tmp_path: Path) -> None:
    """Also those of a model whose output projection is the embedding, which lack nothing."""
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    for shapes, is_tied in ((tied, True), (tied, False), (SHAPES, False)):
        save(tmp_path / "model.safetensors", {**shapes, "score.weight": (2, 128)}, "BF16")
        (found,) = check_model_files(config(tmp_path, tie_word_embeddings=is_tied))
        assert found.rule == ("TC149" if shapes is SHAPES else "TC450")
        assert "score.weight" in found.message and found.is_error == (shapes is not SHAPES)
    said = {"architectures": ["LlamaForTokenClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (found,) = check_model_files(config(tmp_path))
    assert found.rule == "TC450" and found.key == "model.initial_weights"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"b": {"data_offsets": [2, 6]}}, "the bytes of b overlap those of a"),
        ({"b": {"data_offsets": [6, 10]}}, "the bytes of b leave a gap before them"),
        ({"__metadata__": {"format": 3}}, "has a broken __metadata__"),
        ({"__metadata__": ["pt"]}, "has a broken __metadata__"),
    ],
)
def test_a_damaged_header_is_reported(tmp_path: Path, change: Any, words: str) -> None:
    half = {"dtype": "BF16", "shape": [2]}
    header = {name: {**half, "data_offsets": [4 * at, 4 * at + 4]} for at, name in enumerate("ab")}
    for name, entry in change.items():
        header[name] = {**header[name], **entry} if name in header else entry
    text = json.dumps(header).encode()
    content = struct.pack("<Q", len(text)) + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    (found,) = check_model_files(config(tmp_path))
    assert found.rule == "TC145" and words in found.message


def test_quantised_and_broken_files_are_reported(tmp_path: Path) -> None:
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
    assert "'../b.safetensors' is no name of a file" in found.message


@pytest.mark.usefixtures("preloaded")
def test_published_names_are_held_against_the_model_by_transformers(tmp_path: Path) -> None:
    shape = {"vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2}
    kind = {"num_key_value_heads": 2, "intermediate_size": 3, "num_local_experts": 2}
    settings = {"model_type": "mixtral", **shape, **kind}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    block = "model.layers.0."
    stored: dict[str, tuple[int, ...]] = dict.fromkeys(
        [f"{block}self_attn.{name}_proj.weight" for name in "qkvo"], (4, 4)
    )
    norms = (f"{block}input_layernorm", f"{block}post_attention_layernorm", "model.norm")
    stored |= {f"{name}.weight": (4,) for name in norms}
    stored |= {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (8, 4)}
    stored[f"{block}block_sparse_moe.gate.weight"] = (2, 4)
    for expert in range(2):
        for name, sizes in (("w1", (3, 4)), ("w2", (4, 3)), ("w3", (3, 4))):
            stored[f"{block}block_sparse_moe.experts.{expert}.{name}.weight"] = sizes
    save(tmp_path / "model.safetensors", stored, "BF16")
    fused = {f"{block}mlp.experts.gate_up_proj": (2, 6, 4), f"{block}mlp.gate.weight": (2, 4)}
    table = [f"{name} {'x'.join(map(str, shape))} expert" for name, shape in fused.items()]
    model = {"family": "hf", "path": str(tmp_path), "anatomy": table}
    assert check_model_files(config(tmp_path, **model)) == []
    del stored[f"{block}block_sparse_moe.experts.1.w3.weight"]
    save(tmp_path / "model.safetensors", stored, "BF16")
    (found,) = check_model_files(config(tmp_path, **model))
    assert found.rule == "TC148" and f"{block}mlp.experts.gate_up_proj" in found.message
    assert "in model.safetensors" in found.message


def tokenizer(folder: Path, *tokens: str) -> TokenizerFromPath:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    found: TokenizerFromPath = new_section("tokenizer", "hf", path=str(folder))
    return found


def test_a_model_s_code_that_hangs_is_a_problem_in_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(tracing, "SECONDS", 1)
    monkeypatch.setattr(tracing, "PROGRESS_SECONDS", 1)
    problems, unused = _compare_by_transformers(ModelConfig(), tmp_path)
    assert problems == ["their names cannot be told: its process took more than 1 s: no word"]
    assert unused == []


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


def test_no_end_of_document_is_reported_and_documents_can_be_masked(tmp_path: Path) -> None:
    made = RunConfig()
    made.tokenizer = tokenizer(tmp_path, "a", "b")
    (found,) = check_tokenizer_files(made)
    assert found.rule == "TC154" and not found.is_error
    made.data.mask_documents = True  # the corpus knows where each of them ends
    assert check_tokenizer_files(made) == [found]


def test_bytes_for_weights_that_know_other_ids_are_reported(tmp_path: Path) -> None:
    made = config(tmp_path)
    assert check_tokenizer_files(made) == []
    tokenizer(tmp_path, "a", "</s>")
    (found,) = check_tokenizer_files(made)
    assert found.hint == f"tokenizer=hf tokenizer.path={tmp_path}" and not found.is_error
