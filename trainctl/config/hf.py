"""The shape of a model from a transformers directory's `config.json`; needs no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.keys import ValueProblem, accept, leaves
from trainctl.config.schema import ModelConfig, ModelFamily
from trainctl.errors import Finding, TrainctlError

NO_MODEL, NO_SHAPE = "TC113", "TC114"

NAMES = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "rope_theta": ("rope_theta",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    "initializer_range": ("initializer_range",),
    "sliding_window": ("sliding_window",),
}
"""Field of ours, and the keys that transformers' configurations call it."""

FILLED = ("name", "family", "model_type", "path", *NAMES)
"""Fields that `fill_from_directory` sets."""

REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "norm_epsilon": 1e-6, "rope_theta": 10000.0},
    "mistral": {
        "max_position_embeddings": 131072,
        "norm_epsilon": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "norm_epsilon": 1e-6,
        "rope_theta": 10000.0,
        "num_key_value_heads": 32,
        "head_dim": 128,
    },
    "gpt2": {"max_position_embeddings": 1024, "norm_epsilon": 1e-5, "tie_word_embeddings": True},
}
"""What transformers' configuration classes take for a key that the file leaves out."""

PLAIN = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
PLAIN_GPT2 = {
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Keys that our families have one value for: any other value makes the model `hf`."""


def fill_from_directory(model: ModelConfig) -> ModelConfig:
    """The model with the shape that `model.path`/config.json gives.

    The family becomes llama, mistral, qwen3 or gpt2 where the directory is exactly one of those;
    the shape then says it all, and the path is dropped. It stays `hf`, with its path, otherwise
    (biases, scaled rotary embeddings, other architectures).

    Raises:
        TrainctlError: No such directory or file, no JSON, or the shape is incomplete.
    """
    path, raw = _read(model.path)
    kind = str(raw.get("model_type", ""))
    raw = {**raw, **_mapping(raw.get("rope_parameters"))}
    shape = {**DEFAULTS.get(kind, {}), **_known(raw)}
    findings = _incomplete(path, shape)
    accepted: dict[str, Any] = {}
    for name, value in shape.items():
        try:
            accepted[name] = accept(leaves()[f"model.{name}"], value)
        except ValueProblem as problem:
            message = f"{path}: {NAMES[name][0]} is unusable: {problem.message}"
            findings.append(_finding(NO_SHAPE, message, problem.hint))
    if findings:
        raise TrainctlError.from_findings(findings)
    if kind == "gpt2" or "intermediate_size" not in accepted:
        accepted.setdefault("intermediate_size", 4 * accepted["hidden_size"])
    if kind == "qwen3" and not raw.get("use_sliding_window"):
        accepted["sliding_window"] = None
    family = ModelFamily(kind) if _is_ours(kind, raw) else ModelFamily.hf
    name = path.parent.name if model.name == "hf" else model.name
    kept = model.path if family is ModelFamily.hf else None
    return replace(model, name=name, family=family, model_type=kind or None, path=kept, **accepted)


def _read(directory: str | None) -> tuple[Path, dict[str, Any]]:
    if not directory:
        raise _error("model=hf needs a transformers directory", "add model.path=DIR")
    path = Path(directory).expanduser().absolute() / "config.json"
    if not path.parent.is_dir():
        raise _error(f"{directory} is not a directory", "give the folder that holds config.json")
    if not path.is_file():
        raise _error(f"{directory} has no config.json", "give a directory of transformers' form")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _error(f"{path} cannot be read: {error.strerror}", "") from None
    except (ValueError, RecursionError) as error:
        raise _error(f"{path} is not valid JSON: {error}", "") from None
    if not isinstance(raw, dict):
        raise _error(f"{path} holds no JSON object", "")
    return path, raw


def _known(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Our fields that the file gives; nulls count as left out."""
    known = {}
    for name, theirs in NAMES.items():
        values = [raw[key] for key in theirs if raw.get(key) is not None]
        if values:
            known[name] = values[0]
    if "sliding_window" in raw and raw["sliding_window"] is None:
        known["sliding_window"] = None
    return known


def _incomplete(path: Path, shape: Mapping[str, Any]) -> list[Finding]:
    missing = [NAMES[name][0] for name in REQUIRED if name not in shape]
    if not missing:
        return []
    hint = "set them in config.json; parts of a composite model are not read"
    return [_finding(NO_SHAPE, f"{path} lacks {', '.join(missing)}", hint)]


def _is_ours(kind: str, raw: Mapping[str, Any]) -> bool:
    if kind == "gpt2":
        return all(raw.get(key, value) == value for key, value in PLAIN_GPT2.items())
    scaling = _mapping(raw.get("rope_scaling"))
    rope = raw.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    is_plain = all(raw.get(key, value) == value for key, value in PLAIN.items())
    slides = kind == "qwen3" and raw.get("use_sliding_window")
    return kind in ("llama", "mistral", "qwen3") and is_plain and rope == "default" and not slides


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _finding(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule=rule, key="model.path", message=message, hint=hint)


def _error(message: str, hint: str) -> TrainctlError:
    return TrainctlError.from_findings([_finding(NO_MODEL, message, hint)])
