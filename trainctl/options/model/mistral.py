"""Mistral (arXiv:2310.06825): a Llama with optional sliding-window attention."""

from __future__ import annotations

from dataclasses import replace

from trainctl.options.model import SHAPE, Directory, llama

SPEC = replace(
    llama.SPEC,
    name="mistral",
    arguments={**SHAPE, "sliding_window": "sliding_window"},
    has_window=True,
    directory=Directory(
        defaults={
            "max_position_embeddings": 131072,
            "norm_epsilon": 1e-6,
            "rope_theta": 10000.0,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
        },
        plain=llama.PLAIN,
    ),
)
