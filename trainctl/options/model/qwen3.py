"""Qwen3 (arXiv:2505.09388): a Llama with a norm on each head of queries and keys."""

from __future__ import annotations

from dataclasses import replace

from trainctl.options.model import Directory, llama

SPEC = replace(
    llama.SPEC,
    name="qwen3",
    block=(replace(llama.ATTENTION, per_head=("q_norm", "k_norm")), llama.GATED, *llama.NORMS),
    directory=Directory(
        defaults={
            "max_position_embeddings": 32768,
            "norm_epsilon": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        plain=llama.PLAIN,
        switches={"sliding_window": "use_sliding_window"},
    ),
)
