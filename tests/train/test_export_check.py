"""Exports against the libraries that they are for: `--check`, and what llama.cpp makes of GGUF."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from anatomies import read_directory
from chat_files import MARKED, SPECIAL, UNMARKED, write_tokenizer
from fabricated import fabricate
from module_cases import module_config
from rank_processes import tiny_config
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config

from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.train.export.check import (
    CONVERSATIONS,
    TEXTS,
    CheckedExport,
    check_directory,
    check_gguf,
)
from trainctl.train.export.directory import export
from trainctl.train.export.gguf_file import (
    ARCHITECTURES,
    LLAMA3_PATTERN,
    Layout,
    architecture_of,
    export_gguf,
)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": {"num_key_value_heads": None},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "mistral": {"num_key_value_heads": 2},
}
SPLITS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(LLAMA3_PATTERN.replace("{1,3}", "")), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


def write_merges(folder: Path, split: str, template: str = MARKED) -> Path:
    """Write a tokenizer of byte-level BPE that splits texts as llama.cpp's `split` does."""
    write_tokenizer(folder, template)  # for its settings
    backend = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split])
    backend.decoder = decoders.ByteLevel()
    if split == "llama-bpe":
        special = [("<s>", SPECIAL.index("<s>"))]
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=special)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, "1 12 123 1234 12345 it's IT'S they'll the the"], trainer)
    backend.save(str(folder / "tokenizer.json"))
    return folder


def chat_config(tokenizer: Path, **changes: Any) -> RunConfig:
    chat = {"kind": "chat", "paths": ["chat.jsonl"], "packing": "best_fit", "max_bytes": None}
    return tiny_config(
        **{f"data__{key}": value for key, value in chat.items()},
        tokenizer__kind="file",
        tokenizer__path=str(tokenizer / "tokenizer.json"),
        model__vocab_size=352,  # rows without a token
        **changes,
    )


def fabricated(tmp_path: Path, config: RunConfig) -> Path:
    run = RunPaths(tmp_path / "run")
    run.root.mkdir(exist_ok=True)
    return fabricate(run, config.model, deviation=0.1)


def checked_gguf(tmp_path: Path, config: RunConfig, dtype: Any) -> CheckedExport:
    checkpoint, out = fabricated(tmp_path, config), tmp_path / "model.gguf"
    export_gguf(config, checkpoint, out, dtype=dtype)
    return check_gguf(config, checkpoint, out, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "dtype", "within"),
    [
        ("llama", torch.float32, 1e-4),
        ("llama", "q8_0", 1.0),
        ("mistral", torch.float16, 0.02),
        ("gpt2", torch.float32, 0.02),
        ("gpt2", "q8_0", 1.0),
        ("qwen3", torch.bfloat16, 0.2),
    ],
)
def test_llama_cpp_computes_what_the_checkpoint_does(
    tmp_path: Path, family: str, dtype: Any, within: float
) -> None:
    config = tiny_config(model__family=family)
    for name, value in FAMILIES[family].items():
        setattr(config.model, name, value)
    found = checked_gguf(tmp_path, config, dtype)
    assert found.differences == []
    assert found.difference <= found.bound < within and found.scores > 500
    assert (found.rounding > 0) == (dtype is not torch.float32)
    assert found.texts == len(TEXTS) and found.ends == [256]


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (LlamaConfig, {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True}),
        (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}),
        (Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ],
)
def test_llama_cpp_computes_what_a_directory_s_model_does(
    tmp_path: Path, kind: type[PretrainedConfig], changes: dict[str, Any]
) -> None:
    shape = kind(
        vocab_size=260, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, **changes,
    )  # fmt: skip
    shape.save_pretrained(tmp_path / "source")
    config = tiny_config()
    config.model = read_directory(
        ModelConfig(name="x", family="hf", path=str(tmp_path / "source"), weights="random")
    )
    found = checked_gguf(tmp_path, config, torch.float32)
    assert found.differences == [] and found.bound < 1e-3


@pytest.mark.parametrize("split", SPLITS)
def test_llama_cpp_reads_texts_and_messages_as_the_run_does(tmp_path: Path, split: str) -> None:
    config = chat_config(write_merges(tmp_path / "tokenizer", split))
    config.model.tie_word_embeddings = False
    found = checked_gguf(tmp_path, config, torch.float32)
    assert found.differences == []
    assert found.texts == len(TEXTS) + len(CONVERSATIONS) and found.ends == [2]


def test_what_ends_an_answer_beside_a_document_ends_one_in_llama_cpp(tmp_path: Path) -> None:
    over = UNMARKED.replace("<|im_end|>", "<s>")
    config = chat_config(write_merges(tmp_path / "tokenizer", "gpt-2", over))
    found = checked_gguf(tmp_path, config, torch.float32)
    assert found.differences == [] and found.ends == [0, 2]


def test_a_file_in_another_order_of_rows_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Layout, "apply", lambda self, values: values)
    (said,) = checked_gguf(tmp_path, tiny_config(), torch.float32).differences
    assert "scores differ by" in said


def broken_epsilon(out: Path) -> None:
    settings = json.loads((out / "config.json").read_text())
    settings["rms_norm_eps"] *= 10
    (out / "config.json").write_text(json.dumps(settings))


def broken_head(out: Path) -> None:
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].roll(16, dims=0).contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def broken_template(out: Path) -> None:
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings["chat_template"] = settings["chat_template"].replace("assistant\n", "assistant")
    (out / "tokenizer_config.json").write_text(json.dumps(settings))


def broken_end(out: Path) -> None:
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | {"eos_token_id": 7}))


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (broken_epsilon, "scores differ by"),
        (broken_head, "scores differ by"),
        (broken_template, "the messages "),
        (broken_end, r"an answer does not end at \[2\]"),
    ],
)
def test_a_fault_in_a_directory_is_named(tmp_path: Path, fault: Any, said: str) -> None:
    config = chat_config(write_merges(tmp_path / "tokenizer", "qwen2"))
    checkpoint, out = fabricated(tmp_path, config), tmp_path / "out"
    export(config, checkpoint, out, dtype=torch.bfloat16)
    sound = check_directory(config, checkpoint, out, dtype=torch.bfloat16)
    assert sound.differences == [] and sound.texts == len(TEXTS) + len(CONVERSATIONS)
    assert sound.difference <= sound.bound < sound.rounding / 20  # far sharper than bf16
    fault(out)
    found = check_directory(config, checkpoint, out, dtype=torch.bfloat16)
    assert any(re.search(said, each) for each in found.differences), found.differences


def test_a_model_of_mup_and_a_module_are_checked(tmp_path: Path) -> None:
    config = tiny_config(model__mup=True, model__mup_base_width=32)
    checkpoint, out = fabricated(tmp_path, config), tmp_path / "out"
    export(config, checkpoint, out, dtype=torch.float16)
    found = check_directory(config, checkpoint, out, dtype=torch.float16)
    assert found.differences == [] and found.rounding > found.bound
    config = module_config()
    folder = tmp_path / "module"
    folder.mkdir()
    checkpoint, out = fabricated(folder, config), folder / "out"
    export(config, checkpoint, out, dtype=torch.bfloat16)
    found = check_directory(config, checkpoint, out, dtype=torch.bfloat16)
    assert found.differences == [] and found.library == "trainctl.load"


def test_what_llama_cpp_computes_otherwise_is_refused() -> None:
    class Shape(PretrainedConfig):
        model_type = "phi9"

    with pytest.raises(TrainctlError, match=f"knows {', '.join(ARCHITECTURES)}"):
        architecture_of(Shape())
    Shape.model_type = "mistral"
    wide = {"max_position_embeddings": 512, "hidden_act": "silu"}
    assert architecture_of(Shape(**wide, sliding_window=512)).name == "llama"
    with pytest.raises(TrainctlError, match="has no sliding_window=64"):
        architecture_of(Shape(**wide, sliding_window=64))
    Shape.model_type = "qwen2"
    assert architecture_of(Shape(**wide, sliding_window=64, use_sliding_window=False))
    Shape.model_type = "gpt2"
    with pytest.raises(TrainctlError, match="has no activation_function=relu"):
        architecture_of(Shape(activation_function="relu"))


def test_a_tokenizer_that_llama_cpp_lacks_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    folder = write_merges(tmp_path / "tokenizer", "gpt-2")
    config = chat_config(folder)
    checkpoint, out = fabricated(tmp_path, config), tmp_path / "model.gguf"
    made = json.loads((folder / "tokenizer.json").read_text())
    for changes, said in (
        ({"model": {**made["model"], "ignore_merges": True}}, "with ignore_merges=false"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "BPE after Whitespace"),
        ({"normalizer": {"type": "Lowercase"}}, "changes texts by Lowercase"),
        ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": False},
            {"type": "ByteLevel", "add_prefix_space": False,
             "trim_offsets": True, "use_regex": True}]}}, "splits texts by ['Digits'"),
    ):  # fmt: skip
        (folder / "tokenizer.json").write_text(json.dumps({**made, **changes}))
        with pytest.raises(TrainctlError) as caught:
            export_gguf(config, checkpoint, out, dtype=torch.float32)
        assert said in caught.value.message
    other = write_merges(tmp_path / "llama", "llama-bpe")
    llama = json.loads((other / "tokenizer.json").read_text())
    llama["model"]["ignore_merges"] = False
    (folder / "tokenizer.json").write_text(json.dumps(llama))
    with pytest.raises(TrainctlError, match=r"tokenizer\.json has ignore_merges=false") as caught:
        export_gguf(config, checkpoint, out, dtype=torch.float32)
    assert "of the same model with ignore_merges=true" in caught.value.hint
    config = module_config()
    with pytest.raises(TrainctlError, match="does not know a model of your own code"):
        export_gguf(config, checkpoint, out, dtype=torch.float32)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama", "run", "tokenizer"]
