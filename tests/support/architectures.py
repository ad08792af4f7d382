"""Small models of transformers architectures, as directories that transformers saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from anatomies import read_directory
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import AttentionKind, ModelConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "pad_token_id": None,
}
HEADS = {"head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 48}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 32},
    "qwen2": {},
    "qwen3": HEADS,
    "gemma2": HEADS,
    "gemma3_text": {**HEADS, "sliding_window": 32},
    "phi3": {},
    "olmo2": {},
    "gpt2": GPT2,
    "gpt_neox": {},
    "starcoder2": {},
    "glm4": HEADS,
    "granite": {"logits_scaling": 3.0},
    "cohere2": HEADS,
    "smollm3": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, **HEADS},
    "olmoe": EXPERTS,
    "deepseek_v3": LATENT,
    "gpt_oss": {**EXPERTS, **HEADS, "rope_parameters": YARN},
}
"""Settings that differ from `SHAPE`, by transformers' name."""

EAGER = ("gemma2", "gpt_oss")
"""Architectures with no other attention than eager on a CPU."""


def made(kind: str, **changes: Any) -> PreTrainedModel:
    """Build a model with random weights and buffers, in evaluation mode."""
    torch.manual_seed(5)
    common = SHAPE if kind != "gpt2" else {k: v for k, v in SHAPE.items() if "_size" not in k}
    settings = {**common, **ARCHITECTURES[kind], **changes}
    if kind == "gpt2":
        settings = {k: v for k, v in settings.items() if not k.startswith(("num_", "max_"))}
        settings["vocab_size"] = SHAPE["vocab_size"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **settings), attn_implementation=attention_of(kind).value
    )
    for name, buffer in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.5, 0.5)
    return model.eval()


def attention_of(kind: str) -> AttentionKind:
    """Return sdpa, or eager for an architecture that has no other on a CPU."""
    return AttentionKind.eager if kind in EAGER else AttentionKind.sdpa


def of_directory(folder: Path, kind: str) -> ModelConfig:
    """Return the model that trainctl builds from the directory that transformers saved."""
    model = ModelConfig(name="hf", family="hf", path=str(folder))
    model.attention = attention_of(kind)
    return read_directory(model)
