"""Suggestions: changes that make a configuration fit, or that use its free memory for speed.

They are small changes and their combinations, with their memory, and their cost in speed by the
step-time model. A fitting change that only adds to another fitting one is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import log

from trainctl.config.schema import Accelerator, RunConfig
from trainctl.hardware import Hardware
from trainctl.memory.budget import MemoryBudget, device_budget
from trainctl.memory.traced import traced_model
from trainctl.plans.types import LayoutPlan
from trainctl.tuning.assess import assess
from trainctl.tuning.changes import (
    KeyChange,
    adapter_changes,
    memory_saving_changes,
    memory_using_changes,
    quantized_base_changes,
)
from trainctl.tuning.speed import TimedVariant, overrides, time_variant, with_values

MOST_SUGGESTIONS = 4
MOST_TRIES = 400
"""Budgets before giving up; each takes about half a millisecond."""
MOST_TRIES_FOR_SLACK = 40
LEAST_GAIN = 0.02
"""Smallest relative gain in speed that is worth a suggestion."""

# Costs added to the logarithm of the time, which alone would order by speed.
CHANGED_DIMENSION_COST = 0.05
"""Cost per changed dimension: of equally fast changes, fewer dimensions come first."""
DOUBLED_DEVICES_COST = 2.0
"""Cost per doubling of the devices: high, because users may not be able to get more machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """Change with which a configuration fits."""

    overrides: tuple[str, ...]
    """Overrides to add to the command line."""
    peak_bytes: int
    """Peak memory of a device with the change."""
    saved_bytes: int
    """Reduction of the peak by the change; negative if the peak grows."""
    speed: float
    """Tokens per second and device relative to before: 0.8 is a fifth slower."""


def suggest_fitting(config: RunConfig, hardware: Hardware) -> list[Suggestion]:
    """Return up to four changes with which `config` fits `hardware`, the least costly first.

    All keep the global batch, so that training is the same. If the model starts from weights, the
    last suggestion is an adapter if one fits; its base is in 4 bits if that alone makes it fit.
    Empty if the configuration is not legal or fits unchanged, if the device's memory is unknown, or
    if nothing tried helps.
    """
    before = assess(config, hardware)
    if before.plan is None or before.budget is None or before.fits:
        return []
    if hardware.device_memory_bytes is None:
        return []
    batch, now = before.plan.batch, time_variant(config, hardware)
    suggestions: list[Suggestion] = []
    for changes, most in (
        (adapter_changes(config, batch), 1),
        (quantized_base_changes(config, batch), 1),
        (memory_saving_changes(before.plan.config, hardware, batch), MOST_SUGGESTIONS),
    ):
        wanted = most - len(suggestions)
        if not wanted:
            continue
        tries = sorted(
            _time_changes(changes, config, hardware), key=lambda item: _change_cost(*item)
        )
        found = _first_that_fit(tries[:MOST_TRIES], before.budget, now, wanted=wanted)
        suggestions = [*found, *suggestions]
    return suggestions


def suggest_for_slack(config: RunConfig, hardware: Hardware) -> list[Suggestion]:
    """Return up to four changes that use a device's free memory and are faster, the fastest first.

    Empty if the configuration does not fit or nothing is gained, and on a CPU, whose processes
    share one memory and one set of cores.
    """
    if hardware.accelerator is Accelerator.cpu:
        return []
    before = assess(config, hardware)
    now = time_variant(config, hardware)
    if before.plan is None or before.budget is None or now is None or not before.fits:
        return []
    if not before.budget.device_capacity_bytes:
        return []
    tries = [
        (change, variant)
        for change, variant in _time_changes(
            memory_using_changes(before.plan.config, before.plan.batch), config, hardware
        )
        if _relative_speed(variant, now) >= 1 + LEAST_GAIN
    ]
    tries.sort(key=lambda item: item[1].seconds_per_token)
    return _first_that_fit(tries, before.budget, now, most=MOST_TRIES_FOR_SLACK, larger=True)


Tries = list[tuple[KeyChange, TimedVariant]]


def _time_changes(changes: Iterable[KeyChange], config: RunConfig, hardware: Hardware) -> Tries:
    tries = []
    for change in changes:
        changed = with_values(
            config,
            {
                "hardware.nodes": hardware.nodes,
                "hardware.devices_per_node": hardware.devices_per_node,
                **change.values,
            },
        )
        nodes, devices = changed.hardware.nodes, changed.hardware.devices_per_node
        assert devices is not None
        variant = time_variant(changed, replace(hardware, nodes=nodes, devices_per_node=devices))
        if variant is not None:
            tries.append((change, variant))
    return tries


def _change_cost(change: KeyChange, variant: TimedVariant) -> float:
    seconds = variant.seconds_per_token * variant.sketch.mesh.world_size
    speed = log(seconds) if seconds > 0 else 0.0
    return (
        speed + CHANGED_DIMENSION_COST * len(change.kinds) + DOUBLED_DEVICES_COST * change.doublings
    )


def _relative_speed(variant: TimedVariant, now: TimedVariant) -> float:
    """Return the tokens per second and device of `variant` divided by those of `now`."""
    seconds = variant.seconds_per_token * variant.sketch.mesh.world_size
    before = now.seconds_per_token * now.sketch.mesh.world_size
    return before / seconds if seconds else 1.0


def _first_that_fit(
    tries: Tries,
    before: MemoryBudget,
    now: TimedVariant | None,
    *,
    most: int = MOST_TRIES,
    wanted: int = MOST_SUGGESTIONS,
    larger: bool = False,
) -> list[Suggestion]:
    """Return the first `wanted` changes that fit, after at most `most` budgets.

    `tries` are in the order of preference. `before` is the memory and `now` the speed without
    changes. With `larger`, the changes take memory: a change that adds to a too large one is
    skipped, and so is a part of a fitting one, which gains less.
    """
    assert now is not None
    kept: list[KeyChange] = []
    too_large: list[KeyChange] = []
    suggestions: list[Suggestion] = []
    count = 0
    for change, variant in tries:
        if len(kept) == wanted or count == most:
            break
        if any(_is_redundant(change, other, larger) for other in kept):
            continue
        if larger and any(change.only_adds_to(other) for other in too_large):
            continue
        count += 1
        same_batch = variant.sketch.batch.tokens_per_step == now.sketch.batch.tokens_per_step
        if not same_batch or not _fits_device(variant.sketch):
            too_large.append(change)
            continue
        result = assess(variant.sketch.config, variant.sketch.hardware)
        if result.fits and result.budget is not None:
            kept.append(change)
            peak = result.budget.device_peak_bytes
            suggestions.append(
                Suggestion(
                    overrides=overrides(change.values),
                    peak_bytes=peak,
                    saved_bytes=before.device_peak_bytes - peak,
                    speed=_relative_speed(variant, now),
                )
            )
    return suggestions


def _fits_device(sketch: LayoutPlan) -> bool:
    return device_budget(sketch, traced_model(sketch.config)).fits is True


def _is_redundant(change: KeyChange, other: KeyChange, larger: bool) -> bool:
    """Return True if a change needlessly adds to `other`; if `larger`, is a part of `other`."""
    return other.only_adds_to(change) if larger else change.only_adds_to(other)
