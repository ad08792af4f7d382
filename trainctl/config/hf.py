"""Shape and weights of a model, read from its transformers directory without transformers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.hub import is_hub_folder, is_hub_name, local_folder
from trainctl.config.keys import ValueProblem, accept, leaves
from trainctl.config.registry import changed_section, load, names, new_section
from trainctl.config.safetensors_files import has_pickled_weights, has_weights
from trainctl.config.schema import ModelConfig, WeightsKind
from trainctl.errors import Finding, TrainctlError

NO_MODEL, NO_SHAPE, NO_WEIGHTS, OTHER_TASK = "TC113", "TC114", "TC145", "TC450"

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
"""Our fields, each with its names in the configurations of transformers."""

EXPERTS = ("num_experts", "experts_per_token")
"""Fields that an architecture with optional experts may give as 0, for a dense model."""

DIRECTORY_FIELDS = (
    "name",
    "family",
    "model_type",
    "path",
    "initial_weights",
    "router_aux_loss_coef",
    *NAMES,
)
"""Fields that `fill_from_directory` sets, besides the fields of a family."""

OVERRIDABLE_FIELDS = ("name", "initializer_range")
"""Keys that a model that stays `hf` may set beside the directory. The rest of its shape is what
transformers reads from the file.
"""

REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")

LANGUAGE_MODELS = ("CausalLM", "MaskedLM", "PreTraining", "ConditionalGeneration")
"""Suffixes, after `For`, of the names of classes with a head over the vocabulary. Whether such a
class predicts the next token is asked of transformers (`trainctl.train.models.anatomy`).
"""

OTHER_INPUTS = {
    "vision_config": "vision-language",
    "visual": "vision-language",
    "audio_config": "audio-language",
    "speech_config": "audio-language",
}
"""Sections of config.json that describe an encoder of another modality than text."""

POSITIVE_ROPE_KEYS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "partial_rotary_factor",
    "short_factor",
    "long_factor",
)
"""Numbers, or lists of numbers, that transformers divides by or raises to a power."""


def fill_from_directory(model: ModelConfig) -> ModelConfig:
    """Return the model with the shape from `model.path`/config.json, and the weights next to it.

    The family becomes the directory's if the directory matches a known family exactly (llama or
    gpt2, say). The shape is then complete, and only an export reads the directory again (token ids,
    generation settings). Otherwise the family stays as it is (biases, scaled rotary embeddings,
    experts, other architectures). Training starts from the directory's weights unless
    model.weights or model.initial_weights says otherwise. A name on the Hugging Face hub becomes
    the folder that it is downloaded to.

    Raises:
        TrainctlError: No such directory or file, no JSON, the shape is incomplete, or the weights
            are in an unsupported format.
    """
    if model.path and is_hub_name(model.path):
        model = replace(
            model,
            path=local_folder(model.path),
            name=model.path.rpartition("/")[2] if model.name == "hf" else model.name,
        )
    path, raw = _read(model.path)
    other = other_task(path, raw)
    if other is not None:
        raise TrainctlError.from_findings([other])
    kind = str(raw.get("model_type", ""))
    rope = {key: raw.get(key) for key in ("rope_parameters", "rope_scaling")}
    raw = {**raw, **_mapping(rope["rope_parameters"])}
    family = _family(kind)
    form = (family or load("model", model.family)).directory
    is_whole = family is not None and _is_whole(family, raw)
    own = new_section("model", kind).own_keys if is_whole else ()
    called = {**NAMES, **{name: (name,) for name in own}}
    shape = {name: value for name, value in form.defaults.items() if name in called}
    shape |= _known(raw, called)
    findings = [*_incomplete(path, shape), *_unusable_rope(path, rope)]
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
        router_aux_loss_coef=_load_balancing_loss_weight(raw),
        **accepted,
    )
    return filled


def other_task(path: Path, raw: Mapping[str, Any]) -> Finding | None:
    """Return the finding for a config.json of anything but a language model over text alone.

    None for a language model.
    """
    listed = raw.get("architectures")
    classes = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    named = f" ({', '.join(classes)})" if classes else ""
    for key, what in OTHER_INPUTS.items():
        if isinstance(raw.get(key), dict):
            return _finding(
                OTHER_TASK,
                f"{path} is of a {what} model{named}, by its {key}: a language model over text "
                "alone is trained here",
                "a directory of the language model alone, whose config.json has no such section",
            )
    tasks = [match[1] for name in classes if (match := re.search(r"For([A-Z]\w*)$", name))]
    if not classes or len(tasks) < len(classes) or set(tasks) & {*LANGUAGE_MODELS}:
        return None
    return _finding(
        OTHER_TASK,
        f"{path} is of {', '.join(classes)} (architectures): its head does not predict tokens, and "
        "a causal language model is trained here",
        AS_LANGUAGE_MODEL,
    )


AS_LANGUAGE_MODEL = (
    "a directory of a ...ForCausalLM; to train this one's body as one, save it with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
)
"""Hint for a directory of another task."""


def _unusable_rope(path: Path, value: Any, key: str = "") -> Iterator[Finding]:
    """Find rotary parameters, at any depth, that make positions infinite or NaN."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _unusable_rope(path, item, f"{key}.{name}".lstrip("."))
        if "low_freq_factor" in value and value["low_freq_factor"] == value.get("high_freq_factor"):
            message = f"{path}: {key} has one value for low_freq_factor and high_freq_factor"
            yield _finding(NO_SHAPE, message, "high_freq_factor is the larger one, such as 4")
    elif value is not None and key.rpartition(".")[2] in POSITIVE_ROPE_KEYS:
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 < number < math.inf:
                message = f"{path}: {key} is unusable: {number!r:.40} is no number above 0"
                yield _finding(NO_SHAPE, message, "the value that the model was published with")
                break


def _load_balancing_loss_weight(raw: Mapping[str, Any]) -> float | None:
    """Return the weight of the load-balancing loss, if transformers itself would add that loss."""
    weight = raw.get("router_aux_loss_coef")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        return None
    return float(weight) if raw.get("output_router_logits") is True else None


def _weights(model: ModelConfig, folder: Path) -> str | None:
    """Return where the weights of step 0 are read from; None if they are drawn from the seed."""
    if model.initial_weights is not None:
        return model.initial_weights
    if model.weights is WeightsKind.random:
        return None
    # A hub model's weights are fetched by the machines that start from it.
    return str(folder) if has_weights(folder) or is_hub_folder(str(folder)) else None


def _unreadable_weights(model: ModelConfig, folder: Path) -> list[Finding]:
    """Find weights that the configuration needs and that are not in safetensors."""
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
    """Return our fields that the file gives. A null counts as missing, and so does a count of 0
    experts.
    """
    known = {}
    for name, theirs in called.items():
        values = [raw[key] for key in theirs if raw.get(key) is not None]
        if values and not (name in EXPERTS and values[0] == 0):
            known[name] = values[0]
    if not raw.get("sliding_window", True):  # some configurations write 0 for no window
        known["sliding_window"] = None
    return known


def _incomplete(path: Path, shape: Mapping[str, Any]) -> list[Finding]:
    missing = [NAMES[name][0] for name in REQUIRED if name not in shape]
    if not missing:
        return []
    hint = "set them in config.json; parts of a composite model are not read"
    return [_finding(NO_SHAPE, f"{path} lacks {', '.join(missing)}", hint)]


def _family(kind: str) -> Any:
    """Return the spec of the family with this `model_type`; None if there is none."""
    spec = load("model", kind) if kind in names("model") else None
    return None if spec is None or spec.is_directory else spec


def _is_whole(family: Any, raw: Mapping[str, Any]) -> bool:
    """Whether the keys of a family express everything in the file."""
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
