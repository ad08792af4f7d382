"""Comparison of devices: a step is computed again on others, and the one that differs is named.

Ranks keep their devices while their shares of the batch rotate (`train.callbacks.trial`), so each
share is computed on several devices, bit for bit alike if all are sound.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from trainctl.config.compose import ComposedConfig
from trainctl.config.hosts import chosen_hosts
from trainctl.config.keys import as_override
from trainctl.config.reading import read_json
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.errors import TrainctlError
from trainctl.launchers.comparison import FACTOR
from trainctl.launchers.host_checks import planned_hosts
from trainctl.launchers.replay import (
    RecordedResult,
    Replays,
    Say,
    announce_replay,
    checkpoint_before,
    plan_step,
    recorded_steps,
    write_result,
)
from trainctl.options.engine import engine_of
from trainctl.options.launcher.slurm import SlurmConfig
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.settings import replay_tolerance
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import number, steps_from_end
from trainctl.runs.replays import TrialSettings


class TrialVerdict(StrEnum):
    """Verdict on the devices of a run."""

    no_difference = "no difference"
    """All results are alike, bit for bit."""
    named = "named"
    """The results of one device (or part of a replica) differ from those of the others."""
    undecided = "undecided"
    """Results differ, and as many devices have the one as the other."""
    random = "not deterministic"
    """Most devices do not repeat their own results."""


@dataclass(frozen=True, slots=True)
class FaultyDevice:
    """A device whose results differ."""

    rank: int
    host: str
    device: int
    """Index among the ranks of its host."""
    reason: str
    """Difference from the results of the others, in words."""

    def __str__(self) -> str:
        return f"rank {self.rank} (host {self.host}, device {self.device}): {self.reason}"


@dataclass(frozen=True, slots=True)
class DeviceComparison:
    """Verdict, and the devices that it is about."""

    verdict: TrialVerdict
    devices: tuple[FaultyDevice, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial(RecordedResult):
    """Result of a trial."""

    run: str
    step: int
    verdict: TrialVerdict
    devices: tuple[FaultyDevice, ...]
    """Devices whose results differ; several of one replica if one of them spoils the others."""
    ranks: int
    shares: int
    """Number of shares of the batch: data-parallel ranks."""
    times: int
    """Number of devices that computed each share; each device computed one share twice."""
    override: str
    """Override that leaves the devices out, or advice; empty if none is named."""
    file: str = ""
    """The file with this result; empty if the run's directory cannot be written."""

    @property
    def is_good(self) -> bool:
        return self.verdict is TrialVerdict.no_difference and self.reproduces is not False

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        several = "; ".join(map(str, self.devices))
        match self.verdict:
            case TrialVerdict.named if len(self.devices) > 1:
                return (
                    "these devices differ from the others (in a replica of several devices, one "
                    f"spoils the results of all): {several}"
                )
            case TrialVerdict.named:
                return f"differs from the others: {several}"
            case TrialVerdict.undecided:
                return f"one of these differs, and too few others tell which: {several}"
            case TrialVerdict.random:
                return (
                    "most devices do not repeat their own results: step "
                    f"{self.step:,} is not deterministic, and no device can be told from another"
                )
        alike = (
            f"no device differs from itself: {self.ranks} ranks with step {self.step:,} twice; "
            "none of them had the work of another one"
            if self.times == 1
            else f"no device differs: {self.ranks} ranks, {self.shares} shares of step "
            f"{self.step:,}, each on {self.times} devices, bit for bit"
        )
        if self.reproduces is False:
            wrong = next(each for each in self.record if not each.is_reproduced)
            alike += (
                f"; but the run recorded the loss {wrong.recorded!r} at step {wrong.step:,}, and "
                f"all devices now have {wrong.replayed!r}: a fault that has passed, or other code"
            )
        return alike

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for JSON, with what the report lists of it."""
        listed = {"changes": [f"trial --step {self.step}"], "versions": {}}
        return {**RecordedResult.to_dict(self), **listed}


def compare_devices(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    step: int,
    devices: int,
    say: Say,
) -> Trial:
    """Compute a step again on other devices of a run, compare bit for bit, and write the result.

    Args:
        configure: Makes the configuration of the replay from the run's.
        devices: Number of devices that compute each share of the batch.

    Raises:
        TrainctlError: The run has no such step, its samples cannot be computed apart, or the replay
            failed.
    """
    plan = plan_step(configure(config_of(run)), run, step)
    checkpoint = checkpoint_before(run, step)
    with Replays(run, checkpoint) as replays:
        say(f"{announce_replay(checkpoint, step)} on other devices")
        settings = TrialSettings(devices)
        copy = replays.launch("on other devices", plan, settings, stop_step=step - 1)
        ranks = [
            read_json(copy.recording / f"trial-{rank}.json") for rank in range(plan.mesh.world_size)
        ]
        curve = steps_from_end(copy.events, range(1, step))
    losses = {at: number(each["loss"]) for at, each in curve.items()}
    losses[step] = number(ranks[0]["loss"])
    compared = compare_results(ranks, are_replicated=are_weights_replicated(plan.config))
    tolerance = replay_tolerance(plan.config.precision) / FACTOR
    trial = Trial(
        run=str(run.root),
        step=step,
        checkpoint=0 if checkpoint is None else checkpoint.step,
        verdict=compared.verdict,
        devices=compared.devices,
        ranks=len(ranks),
        shares=plan.mesh.data,
        times=min(devices, plan.mesh.data),
        record=recorded_steps(run, losses, lambda _: tolerance),
        override=exclusion(plan, compared),
    )
    return replace(trial, file=write_result(run, trial.to_dict()))


def are_weights_replicated(config: RunConfig) -> bool:
    """Return True if each data-parallel rank holds the same weights between steps."""
    return config.zero_stage.stage < 3 and engine_of(config).takes_json


def compare_results(
    ranks: Sequence[Mapping[str, Any]], *, are_replicated: bool
) -> DeviceComparison:
    """Return the verdict on what the ranks wrote.

    Evidence is looked at from the surest to the weakest: memory that changed while nothing wrote
    to it, results that a device does not repeat, weights that differ from those of the other
    replicas, and shares of which most devices have another result.

    Args:
        ranks: Files of the ranks, in order.
        are_replicated: As `are_weights_replicated`.
    """
    reasons: dict[int, str] = {}
    for each in ranks:
        before, after = each["memory"]
        if any(before[name] != after[name] for name in before.keys() & after.keys()):
            name = _first_difference(before, after)
            reasons[each["rank"]] = f"its {name} changed without an update"
    unsteady = {each["rank"]: _unrepeated(each["shares"]) for each in ranks}
    random = {rank: name for rank, name in unsteady.items() if name}
    if 2 * len(random) > len(ranks):
        return DeviceComparison(TrialVerdict.random)
    for rank, name in random.items():
        reasons.setdefault(rank, f"it does not repeat its own {name}")
    affected = {each["replica"] for each in ranks if each["rank"] in reasons}
    sound = [each for each in ranks if each["replica"] not in affected]
    uncertain: dict[int, str] = {}
    groups = [_weights(part) for part in _parts(sound, 2)] if are_replicated else []
    groups += [results for part in _parts(sound, 3) for results in _shares(part)]
    for results in groups:
        left = {rank: result for rank, result in results.items() if rank not in reasons}
        wrong, is_sure = _outliers(left)
        for rank in wrong:
            other = next(result for result in left.values() if result != left[rank])
            reason = f"its {_first_difference(dict(other), dict(left[rank]))} differs"
            (reasons if is_sure else uncertain).setdefault(rank, reason)
    found = reasons or uncertain
    verdict = TrialVerdict.named if reasons else TrialVerdict.undecided
    if not found:
        return DeviceComparison(TrialVerdict.no_difference)
    faulty = [
        FaultyDevice(each["rank"], each["host"], each["device"], found[each["rank"]])
        for each in ranks
        if each["rank"] in found
    ]
    return DeviceComparison(verdict, tuple(faulty))


Sums = tuple[tuple[str, Hashable], ...]
"""Checksums of a result by name, in the order of computation."""


def _parts(ranks: Iterable[Mapping[str, Any]], axes: int) -> list[list[Mapping[str, Any]]]:
    """Return the ranks with the same work, by their place on the first axes of `part`."""
    found: dict[tuple[int, ...], list[Mapping[str, Any]]] = defaultdict(list)
    for each in ranks:
        found[tuple(each["part"][:axes])].append(each)
    return list(found.values())


def _weights(ranks: Iterable[Mapping[str, Any]]) -> dict[int, Sums]:
    return {
        each["rank"]: tuple(
            pair for pair in each["memory"][0].items() if pair[0].startswith("weight ")
        )
        for each in ranks
    }


def _shares(ranks: Iterable[Mapping[str, Any]]) -> list[dict[int, Sums]]:
    """Return the checksums of each share, by the rank that computed it."""
    found: dict[int, dict[int, Sums]] = defaultdict(dict)
    for each in ranks:
        for share in each["shares"]:
            found[share["share"]][each["rank"]] = tuple(share["sums"].items())
    return list(found.values())


def _unrepeated(shares: Iterable[Mapping[str, Any]]) -> str:
    """Return what a rank computed otherwise the second time; empty if it repeats itself."""
    first: dict[int, Mapping[str, Any]] = {}
    for each in shares:
        known = first.setdefault(each["share"], each["sums"])
        if known != each["sums"]:
            return _first_difference(known, each["sums"])
    return ""


def _outliers(results: Mapping[int, Sums]) -> tuple[set[int], bool]:
    """Return the ranks whose result is not that of the majority; all of them without a majority.

    Returns:
        The ranks, and whether there is a majority.
    """
    counts = Counter(results.values())
    if len(counts) < 2:
        return set(), True
    ((common, count),) = counts.most_common(1)
    is_sure = 2 * count > len(results)
    return {rank for rank, result in results.items() if result != common or not is_sure}, is_sure


def _first_difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    names = [name for name in one if one[name] != other.get(name, one[name])]
    name = next(iter(names), "result")
    is_plain = name in ("loss", "result") or name.startswith(("weight ", "state "))
    return name if is_plain else f"gradient of {name}"


_EXCLUDE = "--exclude="
_NO_OTHER = "run on another machine: this run has no other device"


def exclusion(plan: RunPlan, compared: DeviceComparison) -> str:
    """Return the override that leaves named devices out, or advice where no key does."""
    if compared.verdict is not TrialVerdict.named:
        return ""
    config, hardware = plan.config, plan.hardware
    hosts = sorted({each.host for each in compared.devices})
    if isinstance(config.launcher, SshConfig):
        return _ssh_exclusion(plan, config.launcher, compared.devices)
    if isinstance(config.launcher, SlurmConfig):
        # Of several options of a name sbatch takes the last.
        before = [each for each in config.launcher.slurm_options if each.startswith(_EXCLUDE)]
        hosts = [*(each.removeprefix(_EXCLUDE) for each in before), *hosts]
        others = [each for each in config.launcher.slurm_options if each not in before]
        options = [*others, f"{_EXCLUDE}{','.join(hosts)}"]
        return f'"launcher.slurm_options=[{",".join(map(repr, options))}]"'
    if config.launcher.kind != "local":
        names = ", ".join(hosts)
        return f"launcher.kind={config.launcher.kind} has no key for it: keep {names} out"
    left = hardware.devices_per_node - len(compared.devices)
    if not left:
        return _NO_OTHER
    numbers = ", ".join(str(each.device) for each in compared.devices)
    less = f"hardware.devices_per_node={left}"
    return f"leave device {numbers} out (CUDA_VISIBLE_DEVICES), with {less}"


def _ssh_exclusion(plan: RunPlan, section: SshConfig, devices: Sequence[FaultyDevice]) -> str:
    """Return `launcher.exclude`: of devices, where their hosts have others, or else of hosts."""
    hardware, hosts = plan.hardware, planned_hosts(plan)
    per_host: dict[str, list[int]] = defaultdict(list)
    for each in devices:
        host = hosts[each.rank // hardware.devices_per_node]
        own = host.devices or range(hardware.devices_per_node)
        per_host[host.name].append(own[each.device])
    before = [] if section.exclude is None else [section.exclude]
    few = [f"{name}:{','.join(map(str, sorted(own)))}" for name, own in per_host.items()]
    parts = [*before, *few]
    narrow = replace(section, exclude="@".join(parts))
    has_slots = all(host.slots for host in hosts if host.name in per_host)
    if has_slots and hardware.accelerator is not Accelerator.cpu:
        with suppress(TrainctlError):  # the host has no other device
            chosen_hosts(narrow, hardware.nodes, hardware.devices_per_node)
            return _exclude_override(parts)
    left = hardware.nodes - len(per_host)
    if not left:
        return _NO_OTHER
    return f"{_exclude_override([*before, *per_host])} hardware.nodes={left}"


def _exclude_override(parts: Sequence[str]) -> str:
    """Return the override of `launcher.exclude`, quoted for a shell where a comma needs it."""
    text = "@".join(parts)
    return f"'launcher.exclude={as_override(text)}'" if "," in text else f"launcher.exclude={text}"
