"""What a transformers directory says of a model: its shape, its weights; needs no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.hub import is_hub_folder, is_hub_name, local_folder
from trainctl.config.keys import ValueProblem, accept, leaves
from trainctl.config.registry import changed_section, load, names, new_section
from trainctl.config.safetensors_files import has_pickled_weights, has_weights
from trainctl.config.schema import ModelConfig, WeightsKind
from trainctl.errors import Finding, TrainctlError

NO_MODEL, NO_SHAPE, NO_WEIGHTS = "TC113", "TC114", "TC145"

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
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "experts_per_token", "top_k_experts", "moe_top_k"),
}
"""Field of ours, and the keys that transformers' configurations call it."""

EXPERTS = ("num_experts", "experts_per_token")
"""0 in a model without any, of an architecture that may have some."""

FILLED = (
    "name",
    "family",
    "model_type",
    "path",
    "initial_weights",
    "router_aux_loss_coef",
    *NAMES,
)
"""Fields that `fill_from_directory` sets, besides a family's own."""

APPLIED = ("name", "initializer_range")
"""Of a model that stays `hf`, what has an effect when set beside the directory: the rest of its
shape is what transformers reads from the file."""

REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")


def fill_from_directory(model: ModelConfig) -> ModelConfig:
    """The model with the shape that `model.path`/config.json gives, and the weights beside it.

    The family becomes that of the directory where it is exactly of one that is known (llama or
    gpt2, say); the shape then says it all, and only an export reads the directory again (token ids,
    settings of generation). It stays what it is otherwise (biases, scaled rotary embeddings,
    experts, other architectures). Unless model.weights or model.initial_weights says otherwise,
    training starts from the weights that the directory has. A name on the Hugging Face hub becomes
    the folder that it is downloaded to.

    Raises:
        TrainctlError: No such directory or file, no JSON, the shape is incomplete, or the weights
            are in a form that is not read.
    """
    if model.path and is_hub_name(model.path):
        model = replace(
            model,
            path=local_folder(model.path),
            name=model.path.rpartition("/")[2] if model.name == "hf" else model.name,
        )
    path, raw = _read(model.path)
    kind = str(raw.get("model_type", ""))
    raw = {**raw, **_mapping(raw.get("rope_parameters"))}
    family = _family(kind)
    form = (family or load("model", model.family)).directory
    is_whole = family is not None and _is_whole(family, raw)
    own = new_section("model", kind).own_keys if is_whole else ()
    called = {**NAMES, **{name: (name,) for name in own}}
    shape = {name: value for name, value in form.defaults.items() if name in called}
    shape |= _known(raw, called)
    findings = _incomplete(path, shape)
    accepted: dict[str, Any] = {}
    for name, value in shape.items():
        try:
            accepted[name] = accept(leaves()[f"model.{name}"], value)
        except ValueProblem as problem:
            message = f"{path}: {called[name][0]} is unusable: {problem.message}"
            findings.append(_finding(NO_SHAPE, message, problem.hint))
    findings += _unreadable_weights(model, path.parent)
    if findings:
        raise TrainctlError.from_findings(findings)
    accepted.setdefault("intermediate_size", 4 * accepted["hidden_size"])
    for name, switch in form.switches.items():
        if not raw.get(switch):
            accepted[name] = None
    filled: ModelConfig = changed_section(
        model,
        name=path.parent.name if model.name == "hf" else model.name,
        family=kind if is_whole else model.family,
        model_type=kind or None,
        path=str(path.parent),
        initial_weights=_weights(model, path.parent),
        router_aux_loss_coef=_asked_of_routers(raw),
        **accepted,
    )
    return filled


def _asked_of_routers(raw: Mapping[str, Any]) -> float | None:
    """Weight of the balancing loss, where transformers itself would add it."""
    weight = raw.get("router_aux_loss_coef")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        return None
    return float(weight) if raw.get("output_router_logits") is True else None


def _weights(model: ModelConfig, folder: Path) -> str | None:
    """Where the weights of step 0 come from, if not from the seed."""
    if model.initial_weights is not None:
        return model.initial_weights
    if model.weights is WeightsKind.random:
        return None
    # Of a model of the hub's, those who start from here fetch them.
    return str(folder) if has_weights(folder) or is_hub_folder(str(folder)) else None


def _unreadable_weights(model: ModelConfig, folder: Path) -> list[Finding]:
    """Weights that are meant, and not in safetensors."""
    if _weights(model, folder) is not None or model.weights is WeightsKind.random:
        return []
    if has_pickled_weights(folder):
        what = "has its weights in pickled form, which is not read"
    elif model.weights is WeightsKind.pretrained:
        what = "has no weights, and model.weights=pretrained asks for them"
    else:
        return []
    hint = (
        "save them as safetensors (transformers: save_pretrained), name another directory as "
        "model.initial_weights, or start from random ones with model.weights=random"
    )
    return [replace(_finding(NO_WEIGHTS, f"{folder} {what}", hint), key="model.weights")]


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


def _known(raw: Mapping[str, Any], called: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Our fields that the file gives; nulls count as left out, and so do no experts at all."""
    known = {}
    for name, theirs in called.items():
        values = [raw[key] for key in theirs if raw.get(key) is not None]
        if values and not (name in EXPERTS and values[0] == 0):
            known[name] = values[0]
    if not raw.get("sliding_window", True):  # some configurations write 0 for none
        known["sliding_window"] = None
    return known


def _incomplete(path: Path, shape: Mapping[str, Any]) -> list[Finding]:
    missing = [NAMES[name][0] for name in REQUIRED if name not in shape]
    if not missing:
        return []
    hint = "set them in config.json; parts of a composite model are not read"
    return [_finding(NO_SHAPE, f"{path} lacks {', '.join(missing)}", hint)]


def _family(kind: str) -> Any:
    """The spec of the family that an architecture is, by transformers' name; None of others."""
    spec = load("model", kind) if kind in names("model") else None
    return None if spec is None or spec.is_directory else spec


def _is_whole(family: Any, raw: Mapping[str, Any]) -> bool:
    """Whether a family's keys say all that the file says."""
    form, scaling = family.directory, _mapping(raw.get("rope_scaling"))
    rope = raw.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    is_plain = all(raw.get(key, value) == value for key, value in form.plain.items())
    is_switched = any(raw.get(switch) for switch in form.switches.values())
    return is_plain and not is_switched and (rope == "default" or not family.is_rotary)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _finding(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule=rule, key="model.path", message=message, hint=hint)


def _error(message: str, hint: str) -> TrainctlError:
    return TrainctlError.from_findings([_finding(NO_MODEL, message, hint)])
