"""Parameter shapes and counts, against published totals and transformers' own models."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memory_plans import GPT2, LLAMA_2_7B, LLAMA_3_8B

from trainctl.config.schema import ModelConfig, ParallelismConfig, PipelinePartition
from trainctl.memory.stages import Stage, pipeline_stages
from trainctl.options.model import LAYER_NORM, SHAPE, Family, Region, llama
from trainctl.plans import shapes
from trainctl.plans.derive import blocks_of_stages

LLAMA_32_1B = ModelConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
LLAMA_2_70B = replace(
    LLAMA_2_7B,
    hidden_size=8192,
    intermediate_size=28_672,
    num_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)
MISTRAL_7B = replace(LLAMA_2_7B, family="mistral", intermediate_size=14_336, num_key_value_heads=8)
QWEN3_06B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)
QWEN3_8B = replace(
    QWEN3_06B,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_attention_heads=32,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (LLAMA_2_7B, 6_738_415_616),
        (LLAMA_2_70B, 68_976_648_192),
        (LLAMA_3_8B, 8_030_261_248),
        (LLAMA_32_1B, 1_235_814_400),
        (MISTRAL_7B, 7_241_732_096),
        (QWEN3_06B, 596_049_920),
        (QWEN3_8B, 8_190_735_360),
        (GPT2, 124_439_808),
    ],
)
def test_published_totals(model: ModelConfig, published: int) -> None:
    assert shapes.count_parameters(model).total == published


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gpt2"])
def test_every_tensor_matches_transformers(family: str, tied: bool) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = ModelConfig(
        family=family,
        vocab_size=320,
        hidden_size=96,
        intermediate_size=224,
        num_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=None if family == "gpt2" else 24,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    common = {"vocab_size": 320, "tie_word_embeddings": tied}
    if family == "gpt2":
        config = transformers.GPT2Config(
            n_embd=96, n_inner=224, n_layer=3, n_head=6, n_positions=64, **common
        )
    else:
        config = transformers.AutoConfig.for_model(
            family,
            hidden_size=96,
            intermediate_size=224,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=24,
            **common,
        )
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in real.named_parameters()}

    ours = {t.name: t.shape for t in shapes.embedding_tensors(model)}
    ours |= {t.name: t.shape for t in shapes.final_norm_tensors(model)}
    for layer in range(3):
        prefix = f"{shapes.block_prefix(model)}.{layer}"
        ours |= {f"{prefix}.{t.name}": t.shape for t in shapes.block_tensors(model)}
    if not tied:
        ours["lm_head.weight"] = shapes.head_tensor(model).shape
    assert ours == expected
    count = shapes.count_parameters(model)
    assert count.total == sum(tensor.numel() for tensor in real.parameters())
    assert count.tensors == len(expected)


LAYER_NORMS = replace(
    llama.SPEC,
    name="starcoder2",
    norm=LAYER_NORM,
    block=(
        replace(llama.ATTENTION, column_bias=True, row_bias=True),
        Region("mlp", ("c_fc",), "c_proj", column_bias=True, row_bias=True),
        *llama.NORMS,
    ),
)
FUSED = replace(
    llama.SPEC,
    name="phi3",
    block=(
        Region("self_attn", ("qkv_proj",), "o_proj", fused=3),
        Region("mlp", ("gate_up_proj",), "down_proj", fused=2),
        *llama.NORMS,
    ),
)
BIASED_QUERIES = replace(
    llama.SPEC,
    name="qwen2",
    block=(replace(llama.ATTENTION, column_bias=True), llama.GATED, *llama.NORMS),
)


@pytest.mark.parametrize("spec", [LAYER_NORMS, FUSED, BIASED_QUERIES], ids=lambda spec: spec.name)
def test_facts_say_the_tensors_of_other_architectures(
    spec: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(shapes, "spec_of", lambda model: spec)
    model = ModelConfig(
        vocab_size=320,
        hidden_size=96,
        intermediate_size=224,
        num_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
    )
    config = transformers.AutoConfig.for_model(
        spec.name,
        **{theirs: getattr(model, ours) for ours, theirs in SHAPE.items() if ours != "head_dim"},
        pad_token_id=None,
    )
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in real.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in shapes.all_tensors(model)} == expected


models = st.builds(
    ModelConfig,
    family=st.sampled_from(["llama", "qwen3", "gpt2"]),
    vocab_size=st.integers(0, 5000),
    hidden_size=st.sampled_from([0, 64, 256]),
    intermediate_size=st.integers(0, 1000),
    num_layers=st.integers(0, 40),
    tie_word_embeddings=st.booleans(),
)


@given(
    model=models,
    pipeline=st.integers(1, 8),
    partition=st.sampled_from(PipelinePartition),
)
def test_stages_hold_every_parameter_once(
    model: ModelConfig, pipeline: int, partition: PipelinePartition
) -> None:
    axes = ParallelismConfig(pipeline=pipeline, pipeline_partition=partition)
    blocks = blocks_of_stages(model, axes, sequence_length=512)
    assert min(blocks) > 0 or model.num_layers < pipeline
    held = pipeline_stages(model, stage_blocks=blocks)
    copies = shapes.head_tensor(model).numel if pipeline > 1 and model.tie_word_embeddings else 0
    assert sum(stage.parameters for stage in held) == shapes.count_parameters(model).total + copies
    assert sum(stage.blocks for stage in held) == model.num_layers
    assert len(held) == pipeline


def test_balanced_partition_gives_the_stage_with_the_head_fewer_blocks() -> None:
    def cut(partition: PipelinePartition) -> tuple[Stage, ...]:
        axes = ParallelismConfig(pipeline=4, pipeline_partition=partition)
        blocks = blocks_of_stages(LLAMA_3_8B, axes, sequence_length=8192)
        return pipeline_stages(LLAMA_3_8B, stage_blocks=blocks)

    held, uniform = cut(PipelinePartition.parameters), cut(PipelinePartition.uniform)
    assert max(s.parameters for s in held) < max(s.parameters for s in uniform)
    assert held[-1].blocks < uniform[-1].blocks == 8


def test_tensor_ranks_share_matrices_and_copy_norms() -> None:
    (whole,) = pipeline_stages(LLAMA_3_8B)
    (shard,) = pipeline_stages(LLAMA_3_8B, tensor=4)
    norms = 65 * 4096
    assert shard.parameters == (whole.parameters - norms) // 4 + norms
