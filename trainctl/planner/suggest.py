"""What would make a configuration fit: small changes, the least invasive first.

Each dimension below has its alternatives in the order of what they cost. Combinations are tried
from the cheapest on, and one is kept when it assesses as fitting and does not merely add to one
that was kept before.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from math import log2

from trainctl.config.schema import (
    Accelerator,
    CheckpointingMode,
    LauncherKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.plan.resolve import resolve
from trainctl.plan.types import Batch
from trainctl.planner.assess import assess

MOST_SUGGESTIONS = 4
MOST_TRIES = 120
"""Assessments before giving up; each takes well under a millisecond."""
FULL_NODE = 8
"""Devices of a machine before more machines are suggested."""
MOST_DOUBLINGS = 3
"""Of the devices."""

# What a change costs, for ordering only: roughly the share of speed that it takes.
CHECKPOINTING_COST = 0.25
"""Full recomputation adds a third of the compute: one forward pass to three."""
HALVED_MICRO_BATCH_COST = 0.10
"""Smaller matrices, the same arithmetic."""
STAGE_COST = {1: 0.05, 2: 0.10, 3: 0.20}
"""Stage 3 gathers the weights twice a step: half as much communication again."""
OFFLOADED_OPTIMIZER_COST = 0.60
"""The host's memory bandwidth bounds the update."""
OFFLOADED_PARAMETERS_COST = 0.30
"""Weights come over the host's link in each pass."""
DOUBLED_DEVICES_COST = 1.0
"""Not a matter of speed: more machines are not this user's choice alone."""

Values = tuple[tuple[str, object], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """A change that makes a configuration fit.

    Attributes:
        overrides: What to add to the command line.
        peak_bytes: Peak of a device with it.
    """

    overrides: tuple[str, ...]
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Keys and their new values, and what setting them costs.

    Attributes:
        kinds: The dimensions that it changes, with how far; a change that goes at least as far in
            all of another's dimensions only adds to it.
    """

    values: Values = ()
    cost: float = 0.0
    kinds: tuple[tuple[str, float], ...] = ()

    def __add__(self, other: Change) -> Change:
        return Change(
            values=self.values + other.values,
            cost=self.cost + other.cost,
            kinds=self.kinds + other.kinds,
        )

    def only_adds_to(self, other: Change) -> bool:
        own = dict(self.kinds)
        return all(own.get(kind, 0) >= reach for kind, reach in other.kinds)

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(
            f"{key}={value.value if isinstance(value, Enum) else value}"
            for key, value in self.values
        )


def what_fits(config: RunConfig, hardware: Hardware) -> list[Suggestion]:
    """Up to four changes with which `config` fits `hardware`, the least invasive first.

    All keep the global batch, so that the run learns the same. Empty when the configuration is not
    legal, fits as it is, the device's memory is unknown, or nothing tried helps.
    """
    plan = resolve(config, hardware).plan
    if plan is None or hardware.device_memory_bytes is None or assess(config, hardware).fits:
        return []
    changes = sorted(_changes(config, hardware, plan.batch), key=lambda change: change.cost)
    kept: list[Change] = []
    suggestions: list[Suggestion] = []
    tries = 0
    for change in changes:
        if len(kept) == MOST_SUGGESTIONS or tries == MOST_TRIES:
            break
        if any(change.only_adds_to(other) for other in kept):
            continue
        tries += 1
        changed, changed_hardware = _apply(change, config, hardware)
        result = assess(changed, changed_hardware)
        if result.fits and result.plan is not None and result.budget is not None:
            kept.append(change)
            peak = result.budget.device_peak_bytes
            suggestions.append(Suggestion(overrides=change.overrides, peak_bytes=peak))
    return suggestions


def _changes(config: RunConfig, hardware: Hardware, batch: Batch) -> Iterator[Change]:
    """Every combination of alternatives, the one that changes nothing left out."""
    for parts in product(
        _batches_and_devices(config, hardware, batch),
        _checkpointing(config),
        _stages(config),
        _offloads(config, hardware),
    ):
        change = sum(parts, Change())
        if change.values:
            yield change


def _batches_and_devices(config: RunConfig, hardware: Hardware, batch: Batch) -> Iterator[Change]:
    """Smaller micro batches on as many devices or more, with the same global batch."""
    micro, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
    most = 0 if hardware.accelerator is Accelerator.cpu else MOST_DOUBLINGS
    for doublings in range(most + 1):
        devices = _devices(config, hardware, doublings)
        for smaller in (size for size in range(micro, 0, -1) if micro % size == 0):
            steps, rest = divmod(accumulation * (micro // smaller), 2**doublings)
            if rest or not steps:
                continue
            halvings = log2(micro // smaller)
            values: Values = ()
            if (smaller, steps) != (micro, accumulation):
                values = (
                    ("training.micro_batch_size", smaller),
                    ("training.gradient_accumulation_steps", steps),
                )
            yield devices + Change(
                values=values,
                cost=HALVED_MICRO_BATCH_COST * halvings,
                kinds=(("micro_batch", halvings),) if halvings else (),
            )


def _devices(config: RunConfig, hardware: Hardware, doublings: int) -> Change:
    """More devices in a machine while it has few, then more machines, started by Slurm."""
    if not doublings:
        return Change()
    nodes, devices = hardware.nodes, hardware.devices_per_node
    values: Values = ()
    for _ in range(doublings):
        if nodes == 1 and devices * 2 <= FULL_NODE:
            devices *= 2
        else:
            nodes *= 2
    if devices != hardware.devices_per_node:
        values += (("hardware.devices_per_node", devices),)
    if nodes != hardware.nodes:
        values += (("hardware.nodes", nodes),)
        if config.launcher.kind is LauncherKind.local:
            values += (("launcher.kind", LauncherKind.slurm),)
    return Change(
        values=values, cost=DOUBLED_DEVICES_COST * doublings, kinds=(("devices", doublings),)
    )


def _checkpointing(config: RunConfig) -> Iterator[Change]:
    yield Change()
    settings = config.activation_checkpointing
    if settings.mode is not CheckpointingMode.full:
        yield Change(
            values=(("activation_checkpointing.mode", CheckpointingMode.full),),
            cost=CHECKPOINTING_COST,
            kinds=(("checkpointing", 1),),
        )


def _stages(config: RunConfig) -> Iterator[Change]:
    yield Change()
    for stage in range(config.zero_stage.stage + 1, 4):
        yield Change(
            values=(("zero_stage.stage", stage),),
            cost=STAGE_COST[stage],
            kinds=(("stage", stage),),
        )


def _offloads(config: RunConfig, hardware: Hardware) -> Iterator[Change]:
    """Optimizer, then parameters too, in host memory; on a CPU they are there already."""
    yield Change()
    if hardware.accelerator is Accelerator.cpu:
        return
    values: Values = ()
    cost = 0.0
    for reach, (name, price) in enumerate(
        (("optimizer", OFFLOADED_OPTIMIZER_COST), ("parameters", OFFLOADED_PARAMETERS_COST)), 1
    ):
        if getattr(config.offload, name) is OffloadDevice.none:
            values += ((f"offload.{name}", OffloadDevice.cpu),)
            cost += price
            yield Change(values=values, cost=cost, kinds=(("offload", reach),))


def _apply(change: Change, config: RunConfig, hardware: Hardware) -> tuple[RunConfig, Hardware]:
    """Copies of both with the change made."""
    changed = deepcopy(config)
    changed.hardware.nodes = hardware.nodes
    changed.hardware.devices_per_node = hardware.devices_per_node
    for key, value in change.values:
        section, name = key.split(".")
        setattr(getattr(changed, section), name, value)
    nodes, devices = changed.hardware.nodes, changed.hardware.devices_per_node
    return changed, replace(hardware, nodes=nodes, devices_per_node=devices)
