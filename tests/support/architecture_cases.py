"""Small models of transformers architectures, trained on each axis that may split them.

`scripts/architectures.py` trains all of them and writes `trainctl/options/architectures.json`;
`tests/train/test_architectures.py` trains a few.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from anatomies import read_directory
from rank_processes import tiny_config
from transformers import AutoConfig

from trainctl.config.schema import Accelerator, AttentionKind, DataType, ModelConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "pad_token_id": 1,
}
DROPOUTS = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"layer_types": ALTERNATE, "sliding_window": 64, "query_pre_attn_scalar": 16},
    "gemma3_text": {"layer_types": ALTERNATE, "sliding_window": 64},
    "phi3": {},
    "olmo2": {},
    "gpt2": {"num_key_value_heads": None, "n_inner": 96, "n_positions": 512, **DROPOUTS},
    "gpt_neox": {"num_key_value_heads": 4},
    "starcoder2": {"sliding_window": None},
    "glm4": {"partial_rotary_factor": 0.5},
    "granite": {
        "embedding_multiplier": 6.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "cohere2": {"layer_types": ALTERNATE, "sliding_window": 64, "logit_scale": 0.5},
    "smollm3": {"no_rope_layers": [1, 0, 1], "use_sliding_window": False},
    "mixtral": {**LOCAL, "intermediate_size": 32, "sliding_window": None},
    "qwen3_moe": EXPERTS,
    "olmoe": {**EXPERTS, "intermediate_size": 32},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "head_dim": 8,
    },
    "gpt_oss": {**LOCAL, "intermediate_size": 32, "layer_types": ALTERNATE, "sliding_window": 64},
}
"""Settings of each architecture in addition to `SHAPE`, by transformers' name. Sequences have 64
tokens so that no window cuts them: attention kernels on a part of the sequence do not know windows
(TC012).
"""

EAGER = ("gemma2", "gpt_oss")
"""Architectures for which transformers has no sdpa attention."""

COLUMNS: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"tensor": 2},
    "norms": {"tensor": 2, "sequence_sharded_norms": True},
    "pipeline": {"pipeline": 2},
    "sequence": {"sequence": 2},
    "context": {"context": 2},
}
LENGTH = 64

PAIRS = (
    ("gemma2", "pipeline"),
    ("phi3", "tensor"),
    ("olmo2", "norms"),
    ("granite", "pipeline"),
    ("cohere2", "sequence"),
    ("deepseek_v3", "context"),
    ("deepseek_v3", "tensor"),
)
"""Cases that the tests train: each column, and each kind of split that trainctl's own families do
not cover.
"""


def directory(folder: Path, kind: str, **changes: Any) -> ModelConfig:
    """Write a model directory with a configuration and no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(kind, **{**SHAPE, **ARCHITECTURES[kind], **changes})
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    model = read_directory(ModelConfig(name="hf", family="hf", path=str(folder)))
    return replace(model, attention=AttentionKind.eager) if kind in EAGER else model


def plan(
    model: ModelConfig, parallelism: Mapping[str, Any], *, steps: int
) -> RunPlan | tuple[Finding, ...]:
    """Return the plan on as many processes as the case needs, or the errors."""
    config = tiny_config(
        steps=steps,
        sequence_length=LENGTH,
        gradient_accumulation_steps=2,
        optimizer__gradient_clipping=0.5,
        optimizer__lr=1e-3,
        schedule__warmup_steps=3,
        checkpoint__at_end=False,
        evaluation_samples=0,
        sample_tokens=0,
        zero_stage__stage=1,
    )
    config.model, config.precision.compute = model, DataType.fp32
    for name, value in parallelism.items():
        setattr(config.parallelism, name, value)
    axes = config.parallelism
    world = axes.tensor * axes.pipeline * axes.sequence_parts * (axes.data or 1)
    hardware = Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=world)
    resolution = resolve(config, hardware)
    return resolution.plan or tuple(item for item in resolution.findings if item.is_error)
