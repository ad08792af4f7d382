"""Llama (arXiv:2302.13971): RMS norms, rotary positions, grouped queries, a gated layer."""

from __future__ import annotations

from trainctl.config.schema import ModelConfig
from trainctl.options.model import Directory, Family, Region

ATTENTION = Region("self_attn", ("q_proj", "k_proj", "v_proj"), "o_proj")
GATED = Region("mlp", ("gate_proj", "up_proj"), "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")
PLAIN = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
}

SPEC = Family(
    name="llama",
    keys=ModelConfig,
    decoder="model",
    embedding="embed_tokens",
    blocks="layers",
    block=(ATTENTION, GATED, *NORMS),
    final_norm="norm",
    directory=Directory(
        defaults={"max_position_embeddings": 2048, "norm_epsilon": 1e-6, "rope_theta": 10000.0},
        plain=PLAIN,
    ),
    has_mup=True,
    has_liger=True,
)
