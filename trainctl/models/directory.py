"""Directories of transformers: facts in their config.json, and downloads from the Hugging Face hub.

Read without transformers. A directory of the hub's cache identifies its model
(`models--ORG--NAME/snapshots/COMMIT`). A plan therefore needs the small files only, and each
machine that starts from the model fetches the weights of that commit itself.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.models.local_path import is_file, is_folder, is_there, local_path
from trainctl.models.tensors import INDEX, has_weights, weight_map

NO_MODEL, NO_SHAPE, OTHER_TASK = "TC113", "TC114", "TC450"

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

REQUIRED = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads")

LANGUAGE_MODELS = ("CausalLM", "MaskedLM", "PreTraining", "ConditionalGeneration")
"""Suffixes, after `For`, of the names of classes with a head over the vocabulary. Whether such a
class predicts the next token is asked of transformers (`trainctl.train.models.anatomy`).
"""

ENCODERS = ("bert", "modernbert")
"""`model_type` of the encoders that can be trained. Their attention keeps documents apart, by the
mask that a rank gives it.
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


def read_config(directory: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the path and the content of a directory's config.json.

    Raises:
        TrainctlError: There is no such directory or file, or it holds no JSON object.
    """
    if not directory:
        raise _no_model_error("model=hf needs a transformers directory", "add model.path=DIR")
    path = local_path(directory).absolute() / "config.json"
    if not is_folder(path.parent):
        raise _no_model_error(
            f"{directory} is not a directory", "give the folder that holds config.json"
        )
    if not is_file(path):
        raise _no_model_error(
            f"{directory} has no config.json", "give a directory of transformers' form"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_model_error(f"{path} cannot be read: {error.strerror}", "") from None
    except (ValueError, RecursionError) as error:
        raise _no_model_error(f"{path} is not valid JSON: {error}", "") from None
    if not isinstance(raw, dict):
        raise _no_model_error(f"{path} holds no JSON object", "")
    return path, raw


def other_task_finding(
    path: Path, raw: Mapping[str, Any], *, has_score: bool = False
) -> Finding | None:
    """Return the finding for a config.json of anything but a language model over text alone.

    None for a language model.

    Args:
        has_score: Whether the run's model has a head `score`, so that a classifier is one too.
    """
    listed = raw.get("architectures")
    classes = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    named = f" ({', '.join(classes)})" if classes else ""
    for key, what in OTHER_INPUTS.items():
        if isinstance(raw.get(key), dict):
            return path_finding(
                OTHER_TASK,
                f"{path} is of a {what} model{named}, by its {key}: a language model over text "
                "alone is trained here",
                "a directory of the language model alone, whose config.json has no such section",
            )
    tasks = [match[1] for name in classes if (match := re.search(r"For([A-Z]\w*)$", name))]
    known = {*LANGUAGE_MODELS, *(["SequenceClassification"] if has_score else [])}
    if not classes or len(tasks) < len(classes) or set(tasks) & known:
        return None
    return path_finding(
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


def find_unusable_rope(path: Path, value: Any, key: str = "") -> Iterator[Finding]:
    """Find rotary parameters, at any depth, that make positions infinite or NaN."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from find_unusable_rope(path, item, f"{key}.{name}".lstrip("."))
        if "low_freq_factor" in value and value["low_freq_factor"] == value.get("high_freq_factor"):
            message = f"{path}: {key} has one value for low_freq_factor and high_freq_factor"
            yield path_finding(NO_SHAPE, message, "high_freq_factor is the larger one, such as 4")
    elif value is not None and key.rpartition(".")[2] in POSITIVE_ROPE_KEYS:
        for number in value if isinstance(value, list) else [value]:
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not is_number or not 0 < number < math.inf:
                message = f"{path}: {key} is unusable: {number!r:.40} is no number above 0"
                yield path_finding(NO_SHAPE, message, "the value that the model was published with")
                break


def load_balancing_loss_weight(raw: Mapping[str, Any]) -> float | None:
    """Return the weight of the load-balancing loss, if transformers itself would add that loss."""
    weight = raw.get("router_aux_loss_coef")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight < 0:
        return None
    return float(weight) if raw.get("output_router_logits") is True else None


def known_fields(raw: Mapping[str, Any], called: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Return our fields that the file gives. A null counts as missing, and so does a count of 0
    experts.
    """
    known = {}
    for name, theirs in called.items():
        values = [raw[key] for key in theirs if raw.get(key) is not None]
        if values and not (name in EXPERTS and values[0] == 0):
            known[name] = values[0]
    # Some configurations write 0 for no window, and Qwen2's a window that is off.
    if not (raw.get("sliding_window", True) and raw.get("use_sliding_window", True)):
        known["sliding_window"] = None
    return known


def missing_fields(path: Path, shape: Mapping[str, Any]) -> list[Finding]:
    """Return a finding if fields that every shape needs are missing."""
    missing = [NAMES[name][0] for name in REQUIRED if name not in shape]
    if not missing:
        return []
    hint = "set them in config.json; parts of a composite model are not read"
    return [path_finding(NO_SHAPE, f"{path} lacks {', '.join(missing)}", hint)]


def mapping_or_empty(value: Any) -> dict[str, Any]:
    """Return the value if it is a mapping, else an empty one."""
    return value if isinstance(value, dict) else {}


def path_finding(rule: str, message: str, hint: str) -> Finding:
    """Return a finding about `model.path`."""
    return Finding(rule=rule, key="model.path", message=message, hint=hint)


def _no_model_error(message: str, hint: str) -> TrainctlError:
    return TrainctlError.from_findings([path_finding(NO_MODEL, message, hint)])


SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""Configuration, tokenizer, weight index, and code (which runs only with
model.trust_remote_code).
"""
WEIGHTS = ("*.safetensors",)

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SNAPSHOT = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$")


def is_hub_name(text: str) -> bool:
    """Whether a text can be a name on the hub, `ORG/NAME`, and is no existing path."""
    return _NAME.fullmatch(text) is not None and not is_there(Path(text))


def local_folder(name: str, key: str = "model.path") -> str:
    """Return the folder of a model's small files, downloaded if they are not in the hub's cache.

    Args:
        key: Configuration key that holds the name, for messages.

    Raises:
        TrainctlError: The files are not here and cannot be fetched.
    """
    return _download(name, None, SMALL, key)


def fetch_weights(folder: str, key: str = "model.initial_weights") -> None:
    """Download the weights that a folder of the hub's cache lacks.

    Does nothing for any other folder.

    Raises:
        TrainctlError: They cannot be fetched.
    """
    found = _SNAPSHOT.search(str(local_path(folder).absolute()))
    if found is None or _is_complete_download(Path(folder)):
        return
    owner, name, commit = found.groups()
    print(f"downloading the weights of {owner}/{name} from the hub", file=sys.stderr, flush=True)
    _download(f"{owner}/{name}", commit, (*SMALL, *WEIGHTS), key)


def hub_name(folder: str) -> str | None:
    """Return the hub's name of a model, OWNER/NAME, from its folder in the hub's cache.

    None for any other folder.
    """
    found = _SNAPSHOT.search(str(local_path(folder).absolute()))
    return None if found is None else f"{found[1]}/{found[2]}"


def _is_complete_download(folder: Path) -> bool:
    if (folder / INDEX).is_file():
        return all((folder / file).is_file() for file in weight_map(folder).values())
    return has_weights(folder)


def _download(name: str, commit: str | None, patterns: tuple[str, ...], key: str) -> str:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise _not_found_error(name, "huggingface_hub is not installed", key) from None
    try:
        return str(snapshot_download(name, revision=commit, allow_patterns=list(patterns)))
    except Exception as error:  # from the library, its HTTP client or the network
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise _not_found_error(name, words[0][:160], key) from None


def _not_found_error(name: str, why: str, key: str) -> TrainctlError:
    return TrainctlError(
        f"{name} is no directory here, and cannot be fetched from the Hugging Face hub ({why})",
        hint=f"where there is a network: `hf download {name} --local-dir DIR` (`hf auth login` "
        f"first for models that ask for consent), then {key}=DIR",
        exit_code=ExitCode.bad_input,
    )
