"""Model section filled from a transformers directory: its shape, and where its weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.keys import ValueProblem, convert_value, leaves
from trainctl.config.registry import changed_section, list_kinds, load_spec, new_section
from trainctl.config.schema import ModelConfig, WeightsKind
from trainctl.errors import Finding, TrainctlError
from trainctl.models.directory import (
    NAMES,
    NO_SHAPE,
    find_unusable_rope,
    hub_name,
    is_hub_name,
    known_fields,
    load_balancing_loss_weight,
    local_folder,
    mapping_or_empty,
    missing_fields,
    other_task_finding,
    path_finding,
    read_config,
)
from trainctl.models.tensors import has_pickled_weights, has_weights

NO_WEIGHTS = "TC145"

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
    path, raw = read_config(model.path)
    other = other_task_finding(path, raw, has_score=model.score_outputs is not None)
    if other is not None:
        raise TrainctlError.from_findings([other])
    kind = str(raw.get("model_type", ""))
    rope = {key: raw.get(key) for key in ("rope_parameters", "rope_scaling")}
    raw = {**raw, **mapping_or_empty(rope["rope_parameters"])}
    family = _find_family(kind)
    form = (family or load_spec("model", model.family)).directory
    is_whole = family is not None and _expresses_whole_file(family, raw)
    own = new_section("model", kind).own_keys if is_whole else ()
    called = {**NAMES, **{name: (name,) for name in own}}
    shape = {name: value for name, value in form.defaults.items() if name in called}
    shape |= known_fields(raw, called)
    findings = [*missing_fields(path, shape), *find_unusable_rope(path, rope)]
    accepted: dict[str, Any] = {}
    for name, value in shape.items():
        try:
            accepted[name] = convert_value(leaves()[f"model.{name}"], value)
        except ValueProblem as problem:
            message = f"{path}: {called[name][0]} is unusable: {problem.message}"
            findings.append(path_finding(NO_SHAPE, message, problem.hint))
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
        initial_weights=_initial_weights(model, path.parent),
        router_aux_loss_coef=load_balancing_loss_weight(raw),
        **accepted,
    )
    return filled


def _initial_weights(model: ModelConfig, folder: Path) -> str | None:
    """Return where the weights of step 0 are read from; None if they are drawn from the seed."""
    if model.initial_weights is not None:
        return model.initial_weights
    if model.weights is WeightsKind.random:
        return None
    # A hub model's weights are fetched by the machines that start from it.
    return str(folder) if has_weights(folder) or hub_name(str(folder)) else None


def _unreadable_weights(model: ModelConfig, folder: Path) -> list[Finding]:
    """Find weights that the configuration needs and that are not in safetensors."""
    if _initial_weights(model, folder) is not None or model.weights is WeightsKind.random:
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
    return [replace(path_finding(NO_WEIGHTS, f"{folder} {what}", hint), key="model.weights")]


def _find_family(kind: str) -> Any:
    spec = load_spec("model", kind) if kind in list_kinds("model") else None
    return None if spec is None or spec.is_directory else spec


def _expresses_whole_file(family: Any, raw: Mapping[str, Any]) -> bool:
    form, scaling = family.directory, mapping_or_empty(raw.get("rope_scaling"))
    rope = raw.get("rope_type") or scaling.get("rope_type") or scaling.get("type") or "default"
    is_plain = all(raw.get(key, value) == value for key, value in form.plain.items())
    is_switched = any(raw.get(switch) for switch in form.switches.values())
    return is_plain and not is_switched and (rope == "default" or not family.is_rotary)
