"""Identity of a checkpoint's model: everything that decides what its weights compute.

Weights alone do not determine it. The same tensors with other heads, another rotary base or
another epsilon are another function, and training would continue without an error. Settings that
only change how the function is computed (kernels, layout, number formats), where training starts,
or what dropout drops are not part of the identity and may change on a resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.schema import AdapterConfig, ModelConfig, RunConfig, ScheduleUnit
from trainctl.config.suggest import words
from trainctl.errors import RunStateError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.options import model as families
from trainctl.options.optimizer import spec_of
from trainctl.options.schedule import WithDecay
from trainctl.plans.mup import check_multipliers, multipliers
from trainctl.plans.optimizers import parameter_groups
from trainctl.plans.schedule import Curve
from trainctl.plans.shapes import head_dim, key_value_heads
from trainctl.plans.trainable import is_partial, trainable
from trainctl.plans.types import RunPlan

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_attention_heads",
    "norm_epsilon",
    "tie_word_embeddings",
)

_NON_FUNCTIONAL_KEYS = words(
    """
    _name_or_path architectures bos_token_id dtype eos_token_id initializer_range
    output_attentions output_hidden_states output_router_logits pad_token_id
    router_aux_loss_coef task_specific_params torch_dtype transformers_version use_cache
    """
)
"""Keys of a transformers `config.json` that do not change what the weights compute."""


NON_OPTIMIZER_STATES = frozenset({"master", "average"})
"""States of a checkpoint that do not depend on the optimizer."""

START_KEYS = (
    "config.json",
    "future_blocks",
    "max_position_embeddings",
    "rope_theta",
    "score_outputs",
    "sliding_window",
)
"""Parts of an identity that a new run may change on purpose: to train for a longer context, or on
an objective with a head or blocks of its own.
"""


def model_identity(model: ModelConfig) -> dict[str, Any]:
    """Return what decides the function of a model's weights, without muP's multipliers, as JSON.

    Raises:
        TrainctlError: The model's directory has no readable config.json (exit code 5).
    """
    found: dict[str, Any] = {"family": model.family}
    found |= {name: getattr(model, name) for name in (*_SHAPE, *model.own_keys)}
    found |= {"num_key_value_heads": key_value_heads(model), "head_dim": head_dim(model)}
    spec, everything = families.spec_of(model), not model.has_closed_form
    if spec.is_rotary or everything:
        found["rope_theta"] = model.rope_theta
    if spec.has_window or everything:
        found["sliding_window"] = model.sliding_window
    if not spec.is_rotary or everything:
        found["max_position_embeddings"] = model.max_position_embeddings
    for name in ("score_outputs", "future_blocks"):
        if getattr(model, name) is not None:
            found[name] = getattr(model, name)
    if model.factory is not None:
        found["factory"] = model.factory
    if model.path is not None:
        found["config.json"] = _directory_identity(local_path(model.path))
    return found


def model_description(model: ModelConfig, shapes: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return the description of a model for a checkpoint's manifest.

    `shapes` are the shapes of the model's parameters, by canonical name.

    Returns:
        ``name``; ``configuration``, the result of `model_identity`; and ``sha256``, equal for two
        checkpoints whose weights compute the same function.
    """
    configuration = model_identity(model)
    text = json.dumps([configuration, multipliers(model), shapes], sort_keys=True)
    return {
        "name": model.name,
        "configuration": configuration,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def check_model(
    model: ModelConfig, name: str, manifest: Mapping[str, Any], *, may_differ: Sequence[str] = ()
) -> None:
    """Refuse a checkpoint of another model than `model`.

    A manifest without a model is accepted here; `check_shapes` compares its tensors. `may_differ`
    names parts of the identity that are not compared.

    Raises:
        TrainctlError: The models differ (exit code 5); the message names the differences.
    """
    check_multipliers(model, name, manifest)
    if "model" not in manifest:
        return
    saved, wanted = manifest["model"]["configuration"], model_identity(model)
    had, now = (
        {key: value for key, value in found.items() if key not in may_differ}
        for found in (saved, wanted)
    )
    changes = list(_differences_in_words(had, now, "model."))
    if changes:
        saved_words = _model_in_words(manifest["model"].get("name", ""), saved)
        raise RunStateError(
            f"{name} is of another model: of {saved_words}, and asked for is "
            f"{_model_in_words(model.name, wanted)}; {', '.join(changes)}",
            hint="a run keeps its model: leave out what changes it, or start a new run from the "
            "weights, with model.initial_weights",
        )


def check_optimizer(config: RunConfig, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a checkpoint with the states of another optimizer than the one in `config`.

    An optimizer would load the states whose names it knows, and drop the others silently.

    Raises:
        TrainctlError: The states belong to another optimizer (exit code 5).
    """
    had = set(manifest["states"]) - NON_OPTIMIZER_STATES
    optimizer, spec = config.optimizer, spec_of(config.optimizer)
    rules = {group.uses_muon for group in parameter_groups(config)}
    states = (spec.states_of(optimizer, is_matrix=is_matrix) for is_matrix in rules)
    wanted = set(chain.from_iterable(states))
    if had and had != wanted:
        raise optimizer_mismatch(name, had, wanted)


def check_trainable(config: RunConfig, name: str, manifest: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of a run in which other weights trained than in `config`.

    Raises:
        TrainctlError: The adapter or the frozen weights differ (exit code 5); the message names the
            differences.
    """
    if "base" not in manifest and not is_partial(config):
        return
    # Read like a config section, so that keys missing in older manifests get defaults.
    saved_adapter: AdapterConfig = from_plain(AdapterConfig, manifest.get("adapter", {}))
    had, now = (
        {key: value for key, value in to_plain(adapter).items() if key != "dropout"}
        for adapter in (saved_adapter, config.adapter)
    )
    changes = list(_differences_in_words(had, now, "adapter."))
    if not changes:
        saved = set(manifest["shapes"])
        expected = {tensor.name for tensor in trainable(config).trained}
        for what, names in (("freezes", saved - expected), ("frees", expected - saved)):
            changes += [f"training.freeze now {what} {each}" for each in sorted(names)]
    if changes:
        raise RunStateError(
            f"{name} is of a run in which something else trained: {', '.join(changes[:3])}",
            hint="a run keeps what trains in it: leave out what changes it, or start a new run "
            "from the weights, with model.initial_weights",
        )


def optimizer_mismatch(name: str, had: Collection[str], wanted: Collection[str]) -> TrainctlError:
    """Return the error for a checkpoint whose optimizer states are not the expected ones."""
    return RunStateError(
        f"{name} has the states of another optimizer, {_names_in_words(had)}; this one has "
        f"{_names_in_words(wanted)}",
        hint="keep the optimizer, or start a new run from the weights, with model.initial_weights",
    )


def check_shapes(name: str, manifest: Mapping[str, Any], shapes: Mapping[str, list[int]]) -> None:
    """Refuse a checkpoint unless its tensors are exactly those of the model.

    `shapes` are the shapes of the model's parameters, by canonical name.

    Raises:
        TrainctlError: A tensor is missing, left over or of another shape (exit code 5); the message
            names it.
    """
    saved = manifest["shapes"]
    problems = [
        _first_and_count("the checkpoint lacks", [name for name in shapes if name not in saved]),
        _first_and_count("the model has no", [name for name in saved if name not in shapes]),
        *(
            f"{name} has shape {saved[name]}, the model's is {list(shape)}"
            for name, shape in shapes.items()
            if name in saved and saved[name] != list(shape)
        ),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise RunStateError(
            f"{name} is of another model: {'; '.join(found[:3])}",
            hint="a run keeps its model: start a new run",
        )


def _model_in_words(name: str, found: Mapping[str, Any]) -> str:
    """Return a model's name, architecture and size; older manifests have no name."""
    kind = found.get("config.json", {}).get("model_type") or found.get("family")
    size = f"{found.get('num_layers')} blocks of width {found.get('hidden_size')}"
    return f"{name} ({kind}, {size})" if name else f"a {kind} of {size}"


def _names_in_words(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _first_and_count(what: str, names: list[str]) -> str:
    """Return the first of `names` and the number of the others in words; empty without names."""
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"{what} {names[0]}{more}" if names else ""


def _differences_in_words(
    had: Mapping[str, Any], now: Mapping[str, Any], prefix: str
) -> Iterator[str]:
    for key in sorted({*had, *now}):
        left, right = had.get(key), now.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            yield from _differences_in_words(
                left, right, f"{key} " if key == "config.json" else f"{key}."
            )
        elif left != right:
            yield f"{prefix}{key} was {json.dumps(left)}, and is {json.dumps(right)}"


def _directory_identity(folder: Path) -> dict[str, Any]:
    """Return the part of a transformers directory's config.json that decides the function."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise RunStateError(
            f"{folder}/config.json, which says what the model is, is not readable: {error}",
        ) from None
    return _drop_irrelevant_keys(found)


def _drop_irrelevant_keys(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a transformers configuration without keys irrelevant to the function, recursively."""
    return {
        key: _drop_irrelevant_keys(value) if isinstance(value, dict) else value
        for key, value in found.items()
        if key not in _NON_FUNCTIONAL_KEYS and not key.endswith(("dropout", "_pdrop"))
    }


RATE_TOLERANCE = 1e-9
"""Relative tolerance: two closed forms of the same curve differ by rounding."""


@dataclass(frozen=True, slots=True)
class RateChange:
    """Jump of the learning rate at a resume."""

    step: int
    """Number of the first update after the resume, from 1."""
    before: float
    """Learning rate of that update in the earlier plan; beyond its end, of its last update."""
    now: float
    """Learning rate of that update in the new plan."""


def change_of_rate(before: RunPlan, now: RunPlan, step: int) -> RateChange | None:
    """Return the jump of the learning rate when `now` resumes after `step` updates of `before`.

    Returns None if the rate is the one planned before, or stays at its last value.
    """

    def rate(plan: RunPlan, update: int) -> float:
        return plan.peak_lr * Curve.of(plan).factor(update)

    planned, last, new = rate(before, step), rate(before, max(0, step - 1)), rate(now, step)
    if any(abs(old - new) <= RATE_TOLERANCE * max(old, new) for old in (planned, last)):
        return None
    return RateChange(step + 1, planned, new)


def step_before_decay(before: RunPlan, now: RunPlan, step: int) -> int | None:
    """Return the last step that `now` can resume from if `step` is too late; None otherwise.

    A run with the schedule wsd can be extended until its decay begins. Weights that were trained in
    the decay are not weights of a longer stable phase, so they are not taken back to the peak.
    """
    if not all(isinstance(plan.config.schedule, WithDecay) for plan in (before, now)):
        return None
    old, new = Curve.of(before), Curve.of(now)
    rises = new.factor(step) > old.factor(step) * (1 + RATE_TOLERANCE)
    return old.stable_steps if step > old.stable_steps and rises else None


def miscounts_tokens(before: RunPlan, now: RunPlan, step: int) -> bool:
    """Return True if a schedule in tokens assumes other batches than were trained on so far."""
    if now.config.schedule.unit is not ScheduleUnit.tokens:
        return False
    return before.batches.tokens_before(step) != now.batches.tokens_before(step)
