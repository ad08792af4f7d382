"""GPT-2 (Radford et al. 2019): layer norms, learned positions, biases everywhere, gelu."""

from __future__ import annotations

from trainctl.config.schema import ModelConfig
from trainctl.options.model import GELU_TANH, LAYER_NORM, Directory, Family, Region

SPEC = Family(
    name="gpt2",
    keys=ModelConfig,
    arguments={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "initializer_range": "initializer_range",
        "tie_word_embeddings": "tie_word_embeddings",
    },
    settings={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    decoder="transformer",
    embedding="wte",
    positions="wpe",
    blocks="h",
    block=(
        "ln_1",
        Region(
            "attn",
            ("c_attn",),
            "c_proj",
            fused=3,
            widths=("split_size",),
            column_bias=True,
            row_bias=True,
        ),
        "ln_2",
        Region("mlp", ("c_fc",), "c_proj", column_bias=True, row_bias=True),
    ),
    final_norm="ln_f",
    norm=LAYER_NORM,
    activation=GELU_TANH,
    inputs_first=True,
    has_equal_heads=True,
    softmax_in_fp32=False,
    directory=Directory(
        defaults={
            "max_position_embeddings": 1024,
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        plain={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    has_mup=True,
)
