"""Search for the fastest plans of a composed configuration."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median

from trainctl.config.catalog import option_names, recipe_names, search_folders
from trainctl.config.compose import ComposedConfig
from trainctl.config.overrides import ALIASES
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.launchers.planning import (
    compose_config,
    compose_target,
    input_warnings,
    name_sources,
    read_factory,
)
from trainctl.runs.attempts import find_attempt
from trainctl.runs.records import events_from_end
from trainctl.tuning.search import Search, search

ASSUMED_BATCH = "training.global_batch_tokens=4M"
"""Batch of a search for a model alone: what models of some billion parameters are trained with."""
CHOSEN = "chosen by the search"
EXPECTED_LOAD = "experts.expected_load"
MEASURED_STEPS = 50
"""Last steps of a run whose load of experts is taken for what it will be."""


def compose_search(
    target: str | None, overrides: Sequence[str], config_dir: Path | None
) -> tuple[ComposedConfig, dict[str, str]]:
    """Compose the training to search plans for.

    Args:
        target: A recipe or a run as of `compose_target`, or a model. A model trains on
            `ASSUMED_BATCH` and the longest sequences that it is defined for, unless overrides set
            them: no search could choose them. A run brings the load of its experts, as recorded,
            unless an override sets it.

    Returns:
        The configuration, and the overrides that were assumed, each with its reason.

    Raises:
        TrainctlError: The configuration is wrong, or there is no recipe or model of that name.
    """
    folders = search_folders(config_dir)
    if target is None or "/" in target or target in recipe_names(folders):
        load = None if target is None else measured_load(Path(target))
        if load is not None and not any(text.startswith(EXPECTED_LOAD) for text in overrides):
            overrides = [*overrides, f"{EXPECTED_LOAD}={load:.3g}"]
        return compose_target(target, overrides, config_dir), {}
    models = option_names(folders, "model")
    if target not in models:
        near = nearest_names(target, [*models, *recipe_names(folders)])
        raise TrainctlError(
            f"there is no recipe and no model {target!r}",
            hint=f"{did_you_mean(near)} models: {', '.join(models)}".strip(),
        )
    chosen, assumed = [f"model={target}", *overrides], {}
    if not any(text.startswith("training.global_batch_") for text in overrides):
        assumed[ASSUMED_BATCH] = "a usual batch"
    composed = compose_config([*chosen, *assumed], config_dir)
    if not any(text.partition("=")[0].endswith(".sequence_length") for text in overrides):
        model = composed.config.model
        length = f"training.sequence_length={model.max_position_embeddings}"
        assumed[length] = f"the longest that {model.name} is defined for"
        composed = compose_config([*chosen, *assumed], config_dir)
    return composed, assumed


def measured_load(path: Path) -> float | None:
    """Return the load of the busiest expert over the mean in a run's last steps, averaged over its
    layers; None of anything but a run with records of experts.

    Raises:
        TrainctlError: The run's records cannot be read (exit code 5).
    """
    found = find_attempt(path)
    if found is None:
        return None
    steps = islice(events_from_end(found[0].events, "step"), MEASURED_STEPS)
    recorded = [step["experts"]["load_by_layer"] for step in steps if step.get("experts")]
    return max(1.0, median(map(fmean, recorded))) if recorded else None


def search_plans(composed: ComposedConfig, *, top: int) -> tuple[ComposedConfig, Search]:
    """Search the fastest plans of a composed configuration; what it sets stays as it is.

    Returns:
        The configuration with the sizes of the real model, and what was found: at least one plan.

    Raises:
        TrainctlError: The configuration is not legal (exit code 2), or nothing fits (3).
    """
    composed, unread = read_factory(composed)
    if unread:
        raise TrainctlError.from_findings(name_sources(composed, unread))
    hardware = resolve_hardware(composed.config.hardware)
    names = {override.partition("=")[0] for override in composed.overrides}
    fixed = frozenset(ALIASES.get(name, name) for name in names)
    result = search(composed.config, hardware, fixed=fixed, top=top)
    if not result.found:
        found = name_sources(composed, result.findings)
        raise TrainctlError.from_findings([*composed.findings, *found])
    return composed, result


def search_findings(composed: ComposedConfig, result: Search) -> list[Finding]:
    """Return the warnings of the configuration that was searched for, and of its first plan."""
    first = result.found[0]
    found = [each.set_by(CHOSEN) if each.key in first.values else each for each in first.findings]
    own, _ = input_warnings(composed, first.plan, has_length=result.has_length)
    return list(dict.fromkeys([*composed.findings, *name_sources(composed, found), *own]))
