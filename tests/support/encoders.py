"""Small encoders, written as transformers directories."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from anatomies import read_directory
from transformers import AutoConfig

from trainctl.config.codec import to_plain
from trainctl.config.schema import ModelConfig

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bert": {"num_hidden_layers": 2, "hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0},
    "modernbert": {
        "num_hidden_layers": 3,
        "local_attention": 16,
        **{f"{name}_token_id": None for name in ("bos", "eos", "cls", "sep")},
    },
}


def encoder(folder: Path, kind: str, **settings: Any) -> ModelConfig:
    """Write a directory and return the model that is read from it.

    Args:
        settings: Keys of its config.json in place of a small encoder's.
    """
    AutoConfig.for_model(kind, **(settings or SHAPE | SETTINGS[kind])).save_pretrained(folder)
    return read_directory(ModelConfig(name="encoder", family="hf", path=str(folder)))


def encoder_keys(model: ModelConfig) -> dict[str, Any]:
    """Return the changes of `tiny_config` that train the model."""
    return {f"model__{name}": value for name, value in to_plain(model).items()}
