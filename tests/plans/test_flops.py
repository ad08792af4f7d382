"""Model FLOPs, against what torch counts in transformers' own models, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import config_with
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from trainctl.config.registry import new_section
from trainctl.config.schema import AttentionKind, ModelConfig, RunConfig
from trainctl.options.model import families
from trainctl.plans.flops import (
    attention_products,
    flops_of_run,
    flops_per_token,
    multiplied_weights,
    utilisation,
)
from trainctl.plans.shapes import count_parameters
from trainctl.plans.trainable import trainable
from trainctl.train.models.model import transformers_config

LLAMA_2_7B = ModelConfig(
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_attention_heads=32,
)
GPT2 = ModelConfig(
    family="gpt2",
    vocab_size=50_257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_attention_heads=12,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
SHAPES = st.builds(
    ModelConfig,
    family=st.sampled_from([spec.name for spec in families()]),
    vocab_size=st.integers(20, 90),
    hidden_size=st.sampled_from([16, 32, 48]),
    intermediate_size=st.integers(8, 100),
    num_layers=st.integers(1, 3),
    num_attention_heads=st.sampled_from([2, 4]),
    num_key_value_heads=st.sampled_from([None, 1, 2]),
    head_dim=st.sampled_from([None, 8, 12]),
    tie_word_embeddings=st.booleans(),
    attention=st.just(AttentionKind.eager),
)


def counted(model: ModelConfig, samples: int, length: int) -> int:
    """FLOPs of the matrix products of one forward and backward pass."""
    config = transformers_config(model)
    built = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ids = torch.zeros(samples, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        built(input_ids=ids).logits.sum().backward()
    return counter.get_total_flops()


@settings(max_examples=20)
@given(model=SHAPES, samples=st.integers(1, 2), length=st.integers(2, 40))
def test_as_torch_counts_them(model: ModelConfig, samples: int, length: int) -> None:
    if model.family == "gpt2":
        model = replace(model, num_key_value_heads=None, head_dim=None)
    assert counted(model, samples, length) == samples * length * flops_per_token(model, length)


def test_7b_by_hand() -> None:
    matrices = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 32000 * 4096
    assert multiplied_weights(LLAMA_2_7B) == matrices
    assert flops_per_token(LLAMA_2_7B, 4096) == 6 * matrices + 12 * 32 * 32 * 128 * 4096


def test_a_tied_projection_multiplies_and_an_embedding_does_not() -> None:
    tied = count_parameters(GPT2)
    untied = replace(GPT2, tie_word_embeddings=False)
    assert multiplied_weights(untied) == multiplied_weights(GPT2)
    assert multiplied_weights(GPT2) < tied.total - GPT2.max_position_embeddings * GPT2.hidden_size


def test_a_window_bounds_the_keys() -> None:
    mistral = replace(LLAMA_2_7B, family="mistral", sliding_window=1024)
    assert flops_per_token(mistral, 8192) == flops_per_token(LLAMA_2_7B, 1024)
    assert flops_per_token(mistral, 512) == flops_per_token(LLAMA_2_7B, 512)


def test_recomputation_is_no_progress() -> None:
    """Utilisation of a run that recomputes counts the same FLOPs in a longer time."""
    assert utilisation(6e15, 10.0, devices=4, peak_tflops=300.0) == pytest.approx(0.5)
    assert utilisation(6e15, 12.5, devices=4, peak_tflops=300.0) == pytest.approx(0.4)
    assert utilisation(6e15, 10.0, devices=4, peak_tflops=None) is None


def test_frozen_weights_save_their_gradients() -> None:
    def of(**changes: object) -> int:
        return flops_of_run(config_with(model__num_layers=4, **changes), 64)

    config = config_with(model__num_layers=4)
    whole = flops_per_token(config.model, 64)
    matrices, products = multiplied_weights(config.model), attention_products(config.model, 64)
    assert of() == whole
    assert of(training__freeze=["embeddings"]) == whole  # they are looked up
    head = config.model.vocab_size * config.model.hidden_size
    assert of(training__freeze=["head"]) == whole - 2 * head
    inside = matrices - head
    half = of(training__freeze=["all_but_last_blocks:2"])
    assert half == whole - 4 * (inside // 2) - 2 * products
    lora = config_with(model__num_layers=4, adapter__kind="lora")
    added = trainable(lora).trained_elements
    assert flops_of_run(lora, 64) == whole - 2 * matrices + 6 * added


def test_embeddings_take_a_second_forward_pass_and_no_head():
    config = RunConfig()
    once = flops_of_run(config, 64)
    config.objective = new_section("objective", "contrastive")
    head = config.model.vocab_size * config.model.hidden_size
    assert flops_of_run(config, 64) == once + once // 3 - 8 * head
