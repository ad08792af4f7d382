"""Questions about configurations: the fastest plans of one, what set a value, how two differ, and
whether this machine can run one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

from trainctl.config.catalog import list_recipes, option_names, recipe_names, search_folders
from trainctl.config.compose import ComposedConfig
from trainctl.config.overrides import ALIASES
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.engines.patch_checks import check_definitions, list_uses
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.hardware.host_checks import CheckResult, examine_machine
from trainctl.launchers.planning import (
    can_launch,
    compose_config,
    compose_target,
    input_warnings,
    name_sources,
    plan_config,
    read_factory,
)
from trainctl.models.local_path import local_path
from trainctl.rules.kernel_choice import with_kernels
from trainctl.rules.keyword_search import find_by_keywords
from trainctl.runs.attempts import find_attempt
from trainctl.runs.directory import DEFAULT_ROOT
from trainctl.runs.records import events_from_end
from trainctl.tuning.config_diff import ComparedConfig, json_config, planned_config
from trainctl.tuning.search import Search, search
from trainctl.tuning.value_explanation import Explanation, explain_known

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Checks of this machine for one configuration."""

    hardware: Hardware
    checks: tuple[CheckResult, ...]
    uses: tuple[dict[str, Any], ...]
    """Changes that a run makes in other packages, and undocumented internals that it uses."""
    notes: tuple[Finding, ...]
    """Warnings of the composition."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all checks; an error means that the configuration cannot run here."""
        return tuple(finding for check in self.checks for finding in check.findings)


def examine(composed: ComposedConfig) -> MachineReport:
    """Check this machine for a configuration: packages, compilers, limits, devices."""
    hardware = resolve_hardware(composed.config.hardware, launches=True)
    config = with_kernels(composed.config, hardware)
    checks = (*examine_machine(config, hardware), *check_definitions(config))
    return MachineReport(
        hardware=hardware,
        checks=tuple(
            replace(check, findings=tuple(name_sources(composed, check.findings)))
            for check in checks
        ),
        uses=tuple(list_uses(config)),
        notes=composed.findings,
    )


def recipe_verdicts(config_dir: Path | None) -> list[dict[str, Any]]:
    """Return each recipe with its hardware and whether this machine can launch it.

    Data and weights, which the user must name, are not checked.
    """
    return [
        {
            "name": info.name,
            "what": info.summary,
            "description": info.description,
            "hardware": info.hardware,
            "path": str(info.path),
            **_recipe_verdict(info.name, config_dir),
        }
        for info in list_recipes(config_dir)
    ]


def _recipe_verdict(name: str, config_dir: Path | None) -> dict[str, Any]:
    try:
        fits, reason = can_launch(
            plan_config(compose_config([f"recipe={name}"], config_dir)), DEFAULT_ROOT
        )
    except TrainctlError as error:
        fits, reason = False, error.findings[0].message if error.findings else error.message
    return {"fits_here": fits, "reason": reason}


def explain_value(key: str, composed: ComposedConfig) -> Explanation:
    """Say what set a value of a composed configuration, or how it is derived.

    Raises:
        TrainctlError: There is no such key; or the value follows from a plan, and none can be made.
    """
    planned = plan_config(composed)
    made = planned.assessment.plan
    try:
        return explain_known(key, planned.composed, made)
    except TrainctlError:
        if made is None:
            error = TrainctlError.from_findings(planned.findings)
            if find_by_keywords(key.replace(".", " ")):
                error.hint = f"`trainctl explain {key}` finds keys and pages"
            raise error from None
        raise


def read_compared(
    name: str, config_dir: Path | None, attempt: int | None = None
) -> tuple[ComparedConfig, tuple[Finding, ...]]:
    """Read a recipe, a run directory, or a file of DeepSpeed's JSON, to compare it.

    Returns:
        The configuration, and warnings of its composition.

    Raises:
        TrainctlError: It cannot be read or composed.
    """
    path = local_path(name)
    if attempt is None and (path.is_file() or path.suffix == ".json"):
        return json_config(path), ()
    composed = compose_target(name, (), config_dir, attempt=attempt)
    made = plan_config(composed).assessment.plan
    return planned_config(name, composed.config, made), composed.findings
