"""Published models whose anatomy and trace are shipped, so that planning them starts no process.

`published_models.json` is written by `scripts/published_models.py` from transformers' own classes.
A directory matches a shipped model if its `config.json` agrees in everything that the tensors
depend on: a fine-tune of Qwen2.5 7B matches Qwen2.5 7B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("published_models.json")

PRECISION = "bf16"
"""Format of the shipped traces, without autocast: the most common one in plans."""

IGNORED = {
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "use_cache"),
    *("initializer_range", "max_position_embeddings", "original_max_position_embeddings"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta"),
    *("aux_loss_alpha", "router_aux_loss_coef", "seq_aux", "routed_scaling_factor"),
    *("initial_context_length", "ep_size", "num_nextn_predict_layers", "pretraining_tp"),
}
"""Keys of config.json that affect neither tensors nor what autograd saves."""

DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "embd_pdrop": 0.0,
    "mlp_bias": False,
    "mlp_only_layers": [],
    "output_router_logits": False,
    "resid_pdrop": 0.0,
    "router_jitter_noise": 0.0,
}
"""Values that config.json may write or omit with the same meaning."""

_ROPES_BY_LENGTH = ("dynamic", "longrope", "su")


def shape_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a `config.json` that tensors depend on, normalized for comparison."""
    shape = {
        key: value
        for key, value in raw.items()
        if key not in IGNORED and (key not in DEFAULTS or value != DEFAULTS[key])
    }
    if not shape.get("use_sliding_window", True):
        for key in ("use_sliding_window", "sliding_window", "max_window_layers"):
            shape.pop(key, None)
    layers = shape.pop("layer_types", None) or []
    if set(layers) != {"full_attention"} and layers:
        shape["layer_types"] = " ".join(layers)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in _ROPES_BY_LENGTH:
        shape["rope"] = kind
    return shape


@cache
def table() -> dict[str, Any]:
    """Return the shipped file: version of transformers, and models by name."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def published_name(model: Mapping[str, Any], transformers: str) -> str | None:
    """Return the name of the shipped model that a directory matches; None without a match.

    Args:
        model: Section `model` of a configuration, as plain data.
        transformers: Installed version, which must be the shipped file's; empty if none is.
    """
    if not model["path"] or model["trust_remote_code"] or model["factory"]:
        return None
    if transformers not in ("", table()["transformers"]):
        return None
    try:
        raw = json.loads((Path(model["path"]) / "config.json").read_text(encoding="utf-8"))
        shape = shape_of(raw)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None  # composition has reported the file's problem
    return next((n for n, each in table()["models"].items() if shape in each["shapes"]), None)


def published_anatomy(name: str) -> list[str]:
    """Return the anatomy of a shipped model."""
    anatomy: list[str] = table()["models"][name]["anatomy"]
    return anatomy


def published_trace(name: str, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the shipped trace of a model, as `trace_in_child` does; None for other formats.

    Bytes per token of a block have a constant part and a part proportional to the sequence length,
    which eager attention and heads of unequal widths save.
    """
    entry, precision = table()["models"][name], config["precision"]
    is_attention = config["model"]["attention"] in (entry["attention"], "flash_attention_2")
    if not is_attention or precision["compute"] != PRECISION or precision["autocast"]:
        return None
    if config["data"]["mask_documents"]:
        return None
    length = config["training"]["sequence_length"]
    block = {
        part: round(fixed + by_length * length)
        for part, (fixed, by_length) in entry["block"].items()
    }
    return {"anatomy": entry["anatomy"], "block": block}
