"""Tests that compare the anatomy read from an architecture with transformers' model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from anatomies import read_directory
from transformers import AutoConfig, AutoModelForCausalLM

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import Role, parse_anatomy
from trainctl.options.model import families
from trainctl.plans import flops, shapes
from trainctl.train.models.anatomy import anatomy, anatomy_of_built
from trainctl.train.models.model import failure_hint, skeleton
from trainctl.train.models.weights import SkipInit

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
MIXTURE = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
DEEPSEEK = {
    **MIXTURE,
    **LATENT,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "v_head_dim": 12,
    "head_dim": 8,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

ARCHITECTURES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {"sliding_window": 32, "sliding_window_pattern": 2},
    "phi3": {},
    "olmo2": {},
    "gpt2": {},
    "gpt_neox": {},
    "starcoder2": {},
    "glm4": {},
    "granite": {},
    "cohere2": {},
    "smollm3": {},
    "falcon": {"head_dim": None},  # has a table of attentions of its own
    "bloom": {"n_layer": 3, "n_head": 4},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {**MIXTURE, "num_experts": 8},
    "qwen2_moe": {**MIXTURE, "num_experts": 8, "shared_expert_intermediate_size": 48},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {**MIXTURE, "num_experts": 8, "full_attention_interval": 3},
}
EXPERTS = {kind for kind, settings in ARCHITECTURES.items() if "expert" in str(settings)}


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_an_anatomy_says_what_the_model_has(kind: str, tmp_path) -> None:
    settings = {k: v for k, v in (SHAPE | ARCHITECTURES[kind]).items() if v is not None}
    config = AutoConfig.for_model(kind, **settings)
    config.save_pretrained(tmp_path)
    model = ModelConfig(name="hf", family="hf", path=str(tmp_path))
    told = anatomy(model)
    table = told.to_table()
    read = parse_anatomy(table)
    with torch.device("meta"), SkipInit():
        real = AutoModelForCausalLM.from_config(config)
    named = {name: tuple(tensor.shape) for name, tensor in real.named_parameters()}
    assert {each.name: each.shape for each in read.parameters} == named
    assert sorted(map(repr, read.parameters)) == sorted(map(repr, told.parameters))
    assert (read.blocks, read.ties, read.buffers) == (told.blocks, told.ties, told.buffers)
    names = {name for name, _ in real.named_parameters(remove_duplicate=False)}
    assert {name for name, _ in read.ties} == names - set(named)
    saved = set(real.state_dict()) - names
    assert {buffer.name for buffer in read.buffers} == saved

    assert len(read.blocks) == 3
    inside = {each.name for each in read.parameters if each.block is not None}
    numbers = [real.get_submodule(block.name) for block in read.blocks]
    assert inside == {
        f"{block.name}.{name}"
        for block, module in zip(read.blocks, numbers, strict=True)
        for name, _ in module.named_parameters()
    }
    assert read.has_experts == (kind in EXPERTS)
    if read.has_experts:
        sparse = read.blocks[-1]
        assert (sparse.experts, sparse.experts_per_token) == (8, 2)
        assert all(each.shape[0] == 8 for each in read.parameters if each.role is Role.expert)
        assert read.active < read.total and read.numel(Role.router) >= 8 * 64
    assert read.head == 300 * 64 and read.embedding == 300 * 64
    heads = {each.heads for block in read.blocks for each in block.attention}
    assert heads == {4}
    assert read.is_recurrent == (kind == "qwen3_next")


@pytest.mark.parametrize(
    ("kind", "apart", "unsharded_init", "biased"),
    [
        ("mixtral", (False, False), "", False),
        ("deepseek_v3", (False, False), "", True),
        ("llama4_text", (True, True), "", False),
        ("afmoe", (False, True), "", False),
        ("qwen3_next", (False, False), "model.layers.0.linear_attn.A_log", False),
    ],
)
def test_an_anatomy_says_what_a_rank_cannot_do(
    kind: str, apart: tuple[bool, bool], unsharded_init: str, biased: bool, tmp_path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    told = anatomy(ModelConfig(name="hf", family="hf", path=str(tmp_path)))
    for each in (told, parse_anatomy(told.to_table())):
        assert (each.has_custom_expert_forward, each.has_unknown_routers) == apart
        assert (each.unsharded_init, each.has_biased_routers) == (unsharded_init, biased)


def test_windows_and_widths_are_those_that_attention_is_given(tmp_path) -> None:
    def attention(kind: str) -> list:
        config = AutoConfig.for_model(kind, **(SHAPE | ARCHITECTURES[kind]))
        config.save_pretrained(tmp_path / kind)
        told = anatomy(ModelConfig(name="hf", family="hf", path=str(tmp_path / kind)))
        return [block.attention[0] for block in told.blocks]

    assert [each.window for each in attention("gemma3_text")] == [32, None, 32]
    assert {(each.key_width, each.value_width) for each in attention("deepseek_v3")} == {(24, 12)}


@pytest.mark.parametrize("family", [spec.name for spec in families()])
def test_closed_forms_are_the_anatomy_of_what_is_built(family: str) -> None:
    model = ModelConfig(
        family=family, head_dim=None if family == "gpt2" else 32, num_layers=3, vocab_size=300
    )
    read = anatomy_of_built(skeleton(model, torch.float32), model)
    assert {each.name: each.shape for each in read.parameters} == {
        each.name: each.shape for each in shapes.all_tensors(model)
    }
    closed = shapes.count_parameters(model)
    assert (read.total, read.numel(Role.embedding)) == (closed.total, closed.embeddings)
    assert read.multiplied == flops.multiplied_weights(model)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("t5", "encoder with a decoder"),
        ("clip_text_model", "no causal language model"),
        ("roberta", "attends to later tokens"),
        ("jetmoe", r"its code goes by values, and there are none \(.*modeling_jetmoe.py:\d+\)"),
    ],
)
def test_models_that_are_no_decoder_are_refused_with_the_reason(
    kind: str, reason: str, tmp_path
) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    with pytest.raises(TrainctlError, match=reason):
        anatomy(ModelConfig(name="hf", family="hf", path=str(tmp_path)))


def test_nothing_is_counted_that_has_not_been_read(tmp_path) -> None:
    AutoConfig.for_model("phi3", **SHAPE).save_pretrained(tmp_path)
    model = read_directory(ModelConfig(name="hf", family="hf", path=str(tmp_path)))
    assert shapes.count_parameters(model).total > 0
    model.anatomy = []
    with pytest.raises(TrainctlError, match="nothing is known of the tensors"):
        shapes.count_parameters(model)


@pytest.mark.parametrize("is_named", [False, True])
def test_the_directorys_own_code_is_advised_only_where_its_config_names_it(
    tmp_path: Path, is_named: bool
) -> None:
    (tmp_path / "convert.py").write_text("")  # of those who published it
    model = ModelConfig(family="hf", path=str(tmp_path))
    content = {"auto_map": {"AutoModelForCausalLM": "convert.Model"}} if is_named else {}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert ("trust_remote_code=true" in failure_hint(model)) == is_named
    assert "trust_remote_code" not in failure_hint(replace(model, trust_remote_code=True))
