"""The Python API: what the commands do, as functions that return objects.

Nothing here prints or exits. A user's mistake is a `TrainctlError` with `findings`. Everything is
imported in the function that needs it: `import trainctl.api` loads no other room but `errors`.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from trainctl.errors import Finding, MachineError, RunFailed, TrainctlError

if TYPE_CHECKING:
    import pandas

    from trainctl.config.compose import ComposedConfig
    from trainctl.config.schema import RunConfig
    from trainctl.hardware import Hardware
    from trainctl.launchers.machine_report import MachineReport
    from trainctl.launchers.migration_proof import MigrationProof
    from trainctl.launchers.offline import WeightsChoice
    from trainctl.launchers.planning import PlannedConfig
    from trainctl.launchers.prove import Proof
    from trainctl.launchers.start import Observer
    from trainctl.launchers.suspects import Suspects
    from trainctl.launchers.sweep import SweepObserver
    from trainctl.launchers.trial import Trial
    from trainctl.memory.budget import MemoryBudget
    from trainctl.migration.configs.result import ImportResult
    from trainctl.rules.resolve import CheckedFile
    from trainctl.runs.listing import RunStatus
    from trainctl.runs.records import EventFollower, OnEvent, Progress
    from trainctl.tuning.search import FoundPlan, Search
    from trainctl.tuning.suggest import Suggestion
    from trainctl.tuning.value_explanation import Explanation

__all__ = [
    "ChangedKey",
    "Changes",
    "Checkpoint",
    "DeviceMemory",
    "DiskSpace",
    "Finding",
    "Memory",
    "NodeMemory",
    "Plan",
    "RankedPlan",
    "Run",
    "RunFailed",
    "SearchResult",
    "TrainctlError",
    "add_tokens",
    "check_deepspeed",
    "check_machine",
    "fetch",
    "import_checkpoint",
    "import_config",
    "launch",
    "list_checkpoints",
    "list_recipes",
    "list_runs",
    "load",
    "opened_run",
    "plan",
    "prove",
    "prove_migration",
    "report",
    "resume",
    "search",
    "suspects",
    "sweep",
    "trial",
    "verify_checkpoints",
]

Place = str | PathLike[str]
"""A path, as text or as a path object."""

GIB = 2**30


def plan(
    *overrides: str,
    hardware: str | None = None,
    config_dir: Place | None = None,
    attempt: int | None = None,
    files: bool = False,
    exact: bool = False,
    calibrated: bool = True,
) -> Plan:
    """Compose a configuration, check it and budget its memory, without torch.

    Args:
        overrides: `recipe=NAME`, `GROUP=OPTION`, `KEY=VALUE`. The first may be the name of a recipe
            or the path of a run directory.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        attempt: Attempt of the run; None takes the newest that got going.
        files: Refuse files that are missing here or wrong, as before a launch. Otherwise they only
            bring warnings.
        exact: Trace the model for its budget, in a process of its own; takes some seconds.
        calibrated: Use measurements of this machine, if it is the hardware.

    Returns:
        The plan. One that does not fit is returned too: `fits` is then False, and the error is
        among `findings`.

    Raises:
        TrainctlError: The configuration is not legal; `findings` has every problem.
    """
    from trainctl.config.overrides import split_target
    from trainctl.launchers import planning

    target, rest = split_target(_with_hardware(overrides, hardware))
    composed = planning.compose_target(target, rest, _config_dir(config_dir), attempt=attempt)
    settings = {"files": files, "exact": exact, "calibrated": calibrated}
    planned = planning.plan_config(composed, with_files=files, exact=exact, calibrated=calibrated)
    if planned.assessment.plan is None or planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    if not files:
        planned = planning.with_input_warnings(planned)
    again = {"config_dir": config_dir, "attempt": attempt, **settings}
    return Plan(planned, (*([target] if target else []), *rest), again)


def _with_hardware(overrides: Sequence[object], hardware: str | None) -> tuple[str, ...]:
    named = [f"hardware={hardware}"] if hardware is not None else []
    return (*map(str, overrides), *named)


def _folder(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


def _config_dir(place: Place | None) -> Path | None:
    """Return a folder of the user's, whose options are registered."""
    if place is None:
        return None
    from trainctl.config.registry import register_options

    register_options(Path(place), is_trusted=False)
    return Path(place)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """A checked configuration with its memory budget; made by `plan`, never changed."""

    details: PlannedConfig
    """Composed configuration, hardware, frozen plan and budget, as the commands use them. Not part
    of the public API: it may change in any release.
    """
    _arguments: tuple[str, ...]
    _settings: dict[str, Any]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings, and errors on memory if the plan does not fit."""
        return self.details.findings

    @property
    def fits(self) -> bool | None:
        """Whether the plan fits its hardware; None if that is unknown or too close to tell."""
        return False if self.details.errors else self.details.budget.fits

    @property
    def deepspeed_json(self) -> dict[str, Any]:
        """JSON that DeepSpeed gets; empty under another engine."""
        return deepcopy(self.details.plan.deepspeed)

    @property
    def config(self) -> dict[str, Any]:
        """Composed configuration as plain data."""
        from trainctl.config.codec import to_plain

        plain: dict[str, Any] = to_plain(self.details.composed.config)
        return plain

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that the configuration was composed with."""
        return self.details.composed.overrides

    @property
    def memory(self) -> Memory:
        """Memory budget, in bytes."""
        return Memory(self.details.budget, self.details.hardware)

    def commands(self, run_dir: Place = "runs/NEW") -> list[list[str]]:
        """Return the commands that a launch into `run_dir` would start, each as its arguments."""
        from trainctl.launchers.interface import render_next
        from trainctl.runs.layout import RunPaths

        rendered = render_next(self.details.plan, RunPaths(Path(run_dir)))
        return [list(command) for command in rendered.commands]

    def suggestions(self) -> list[Suggestion]:
        """Return up to four changes with which the plan fits, the least costly first; if it fits,
        changes that use its free memory and are faster.

        `plan.with_(*suggestion.overrides)` is the changed plan.
        """
        return self.details.suggestions()

    def explain(self, key: str) -> Explanation:
        """Return what set a value, or how it is derived.

        Args:
            key: Key of the configuration or of DeepSpeed's JSON, or a quantity such as
                `total_steps`.

        Raises:
            TrainctlError: There is no such key.
        """
        from trainctl.tuning.value_explanation import explain_known

        return explain_known(key, self.details.composed, self.details.plan)

    def with_(self, *overrides: str) -> Plan:
        """Return the plan of the same configuration with more overrides.

        An override replaces an earlier one of the same key.

        Raises:
            TrainctlError: The configuration is not legal; `findings` has every problem.
        """
        from trainctl.config.overrides import merge_overrides

        return plan(*merge_overrides(self._arguments, overrides), **self._settings)

    def diff(self, other: Plan) -> Changes:
        """Return what this plan changes of `other`: keys whose values differ in effect.

        A value that is left open counts as what is derived for it.
        """
        from trainctl.tuning.config_diff import compare, planned_config

        before, after = (
            planned_config(_title(each), each.details.composed.config, each.details.plan)
            for each in (other, self)
        )
        found = (
            ChangedKey(each.key, each.left, each.right, each.left_text, each.right_text)
            for each in compare(before, after)
        )
        return Changes(found, other.memory.device.peak, self.memory.device.peak)

    def to_dict(self) -> dict[str, Any]:
        """Return plan, budget and findings as plain data, for JSON."""
        from trainctl.config.codec import to_plain

        return {
            "schema": 1,
            "plan": to_plain(self.details.plan),
            "budget": self.memory.to_dict(),
            "findings": [finding.to_json() for finding in self.findings],
        }

    def __repr__(self) -> str:
        from trainctl.monitor.plan_text import brief_lines, plan_lines

        lines = plan_lines(self.details.plan, self.details.data, brief=True)
        lines += brief_lines(self.details.budget.to_json())
        return "\n".join([*lines, *map(str, self.findings)])

    def _repr_html_(self) -> str:
        from trainctl.monitor.plan_text import plan_rows

        rows = plan_rows(self.details.plan, self.details.data)
        notes = "".join(f"<p>{escape(str(each))}</p>" for each in self.findings)
        table = html_table(rows, caption=f"Plan of {_title(self)}")
        return f"{table}{self.memory._repr_html_()}{notes}"


def _title(plan: Plan) -> str:
    from trainctl.monitor.plan_text import plan_name

    return plan_name(plan.details.plan)


def html_table(
    rows: Iterable[Sequence[object]], heads: Sequence[str] = (), *, caption: str = ""
) -> str:
    """Return a table for a notebook; all texts are escaped."""
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{escape(str(cell))}</td>' for cell in row)
        for row in rows
    )
    title = f'<caption style="text-align:left">{escape(caption)}</caption>' if caption else ""
    return f"<table>{title}{f'<tr>{head}' if head else ''}{body}</table>"


def data_frame(rows: Any, **settings: Any) -> Any:
    """Return a pandas DataFrame.

    Raises:
        TrainctlError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as missing:
        from trainctl.config.extras import install_command

        raise MachineError(
            f"a data frame needs pandas, which cannot be imported ({missing})",
            hint=install_command("pandas"),
        ) from None
    return pandas.DataFrame(rows, **settings)


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A key whose values differ between two plans."""

    key: str
    before: Any
    """Value in the other plan, as plain data; None if it is left open or missing."""
    after: Any
    """Value in this plan, as plain data; None if it is left open or missing."""
    before_text: str
    """Value in the other plan as text, with what is derived for an open one."""
    after_text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before_text} -> {self.after_text}"


class Changes(tuple[ChangedKey, ...]):
    """Changes from one plan to another; made by `Plan.diff`."""

    peak_before: int
    """Peak memory of a device in the other plan, in bytes."""
    peak_after: int

    def __new__(cls, changes: Iterable[ChangedKey], peak_before: int, peak_after: int) -> Changes:
        """Make the changes with the device memory of both plans."""
        made = super().__new__(cls, changes)
        made.peak_before, made.peak_after = peak_before, peak_after
        return made

    def __repr__(self) -> str:
        if not self:
            return "no change"
        return "\n".join([*map(str, self), f"peak of a device: {self._peaks()}"])

    def _peaks(self) -> str:
        return " -> ".join(f"{peak / GIB:,.2f} GiB" for peak in (self.peak_before, self.peak_after))

    def _repr_html_(self) -> str:
        rows = [(each.key, each.before_text, each.after_text) for each in self]
        heads = ("key", "before", "after")
        return html_table(rows, heads, caption=f"peak of a device: {self._peaks()}")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the fullest device, in bytes."""

    peak: int
    """Peak of a step: tensors, driver context, communication library."""
    low: int
    """Lower bound of the peak."""
    high: int
    """Upper bound of the peak, allocator fragmentation included."""
    capacity: int | None
    """None if unknown."""
    peak_phase: str
    """Phase of a step in which the peak is reached."""
    phases: dict[str, int]
    """Bytes in each phase of a step."""
    components: dict[str, int]
    """Bytes of each component at the peak."""


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Host memory or NVMe of one machine, in bytes."""

    peak: int
    capacity: int | None
    """None if unknown."""
    components: dict[str, int]


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Checkpoints on disk, in bytes."""

    checkpoint: int
    """Size of one checkpoint."""
    checkpoints: int
    """Size of all that are kept at once."""
    weights: int
    """Size of one weights-only checkpoint; 0 if none is saved."""
    weights_kept: int
    """Size of all weights-only checkpoints that are kept at once."""


@dataclass(frozen=True, eq=False, repr=False)
class Memory:
    """Memory budget of a plan, in bytes."""

    _budget: MemoryBudget
    _hardware: Hardware

    @property
    def device(self) -> DeviceMemory:
        """Memory of the fullest device."""
        budget = self._budget
        return DeviceMemory(
            peak=budget.device_peak_bytes,
            low=budget.device_peak_low_bytes,
            high=budget.device_peak_high_bytes,
            capacity=budget.device_capacity_bytes or None,
            peak_phase=budget.peak_phase,
            phases=budget.phases,
            components=budget.components.to_json(),
        )

    @property
    def host(self) -> NodeMemory:
        """Host memory of one machine; on CPUs it contains the devices' memory."""
        host, capacity = self._budget.host, self._hardware.host_memory_bytes
        return NodeMemory(host.bytes_per_node, capacity, dict(host.components))

    @property
    def nvme(self) -> NodeMemory:
        """Swap files on the NVMe of one machine."""
        return NodeMemory(self._budget.nvme_bytes_per_node, self._hardware.nvme_bytes, {})

    @property
    def disk(self) -> DiskSpace:
        """Checkpoints on disk."""
        budget = self._budget
        return DiskSpace(
            checkpoint=budget.checkpoint_bytes,
            checkpoints=budget.checkpoints_kept_bytes,
            weights=budget.weights_only_bytes,
            weights_kept=budget.weights_only_kept_bytes,
        )

    def to_frame(self) -> pandas.DataFrame:
        """Return the fullest device's bytes as a data frame: components by phase of a step.

        Raises:
            TrainctlError: pandas is not installed.
        """
        moments = self._budget.worst_stage.moments
        frame = data_frame({phase: moment.to_json() for phase, moment in moments.items()})
        return frame.rename_axis("component")

    def to_dict(self) -> dict[str, Any]:
        """Return the budget as `trainctl estimate-memory --json` prints it."""
        return self._budget.to_json()

    def __repr__(self) -> str:
        from trainctl.monitor.plan_text import budget_lines

        return "\n".join(budget_lines(self.to_dict(), self._hardware.host_memory_bytes))

    def _repr_html_(self) -> str:
        from trainctl.monitor.report.figure import chart_element, memory_figure

        title = self._hardware.name
        chart = chart_element(lambda: memory_figure({title: self._budget}))
        return f"<pre>{escape(repr(self))}</pre>{chart}"


def search(
    *overrides: str, hardware: str | None = None, top: int = 5, config_dir: Place | None = None
) -> SearchResult:
    """Search the fastest layouts, batches and recomputation that are legal and fit.

    Groups and keys that are given stay as they are: `zero_stage=3` plans with ZeRO 3 only.

    Args:
        overrides: As of `plan`. A first word without `=` is a recipe or a run, else a model; a
            model alone is planned for the longest sequence that it is defined for and 4 million
            tokens a step, unless overrides say another length or batch (`assumed` has which).
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        top: Number of plans, each with another layout.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Raises:
        TrainctlError: The configuration is not legal, or nothing fits (`exit_code` 3).
    """
    from trainctl.config.overrides import split_target
    from trainctl.launchers import plan_search
    from trainctl.runs.attempts import find_attempt

    target, rest = split_target(_with_hardware(overrides, hardware))
    composed, assumed = plan_search.compose_search(target, rest, _config_dir(config_dir))
    composed, found = plan_search.search_plans(composed, top=top)
    is_of_run = target is not None and find_attempt(Path(target)) is not None
    base = (target, *rest) if target is not None and is_of_run else composed.overrides
    return SearchResult(composed, replace(found, assumed=assumed), base, config_dir)


class SearchResult(Sequence["RankedPlan"]):
    """Plans that a search found, the fastest first; among equally fast ones, the simplest."""

    def __init__(
        self,
        composed: ComposedConfig,
        details: Search,
        arguments: tuple[str, ...],
        config_dir: Place | None,
    ) -> None:
        """Made by `search`; `arguments` are those of the plan that was searched for."""
        self.details = details
        """Result as the commands use it. Not part of the public API."""
        self._composed = composed
        self._arguments = arguments
        self._config_dir = config_dir

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the configuration that was searched for."""
        return self._composed.overrides

    @property
    def assumed(self) -> tuple[str, ...]:
        """Overrides among these that the search added for a model alone."""
        return tuple(self.details.assumed)

    @property
    def command(self) -> str:
        """Command that launches the first plan, quoted for a shell; for a run, that resumes it.

        It lacks the length of the training if the configuration does.
        """
        from trainctl.config.overrides import merge_overrides
        from trainctl.tuning.recipes import start_command

        return start_command(merge_overrides(self._arguments, self[0].overrides), self._config_dir)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings of the configuration that was searched for, and of its first plan."""
        from trainctl.launchers.plan_search import search_findings

        return tuple(search_findings(self._composed, self.details))

    @overload
    def __getitem__(self, index: int) -> RankedPlan: ...

    @overload
    def __getitem__(self, index: slice) -> list[RankedPlan]: ...

    def __getitem__(self, index: int | slice) -> RankedPlan | list[RankedPlan]:
        plans = [RankedPlan(self, found) for found in self.details.found]
        return plans[index]

    def __len__(self) -> int:
        return len(self.details.found)

    def to_dict(self, price: float | None = None) -> dict[str, Any]:
        """Return the form that `trainctl plan --json` prints; `price` is per device and hour."""
        return self.details.to_json(price)

    def to_frame(self) -> pandas.DataFrame:
        """Return a data frame with a row for each plan, the fastest first.

        Raises:
            TrainctlError: pandas is not installed.
        """
        dropped = ("mesh", "seconds_by_part", "next_faster", "findings")
        rows = []
        for found in self.to_dict()["plans"]:
            plain = {name: value for name, value in found.items() if name not in dropped}
            rows.append({**found["mesh"], **plain, "overrides": " ".join(found["overrides"])})
        return data_frame(rows)

    def write(self, path: Place) -> None:
        """Write the first plan as a recipe.

        Raises:
            TrainctlError: No recipe can be written there, or the configuration says no length.
        """
        self[0].write(path)

    def __repr__(self) -> str:
        from trainctl.monitor.search_text import search_lines

        return "\n".join(search_lines(self.details, command=self.command))

    def _repr_html_(self) -> str:
        from trainctl.monitor.report.figure import chart_element, plan_figure

        chart = chart_element(lambda: plan_figure(self.details))
        return f"<pre>{escape(repr(self))}</pre>{chart}"


@dataclass(frozen=True, eq=False, repr=False)
class RankedPlan:
    """One of the plans that a search found."""

    _result: SearchResult
    details: FoundPlan
    """Result as the commands use it. Not part of the public API."""

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that the search chose, to add to those that were searched for."""
        return self.details.overrides

    @property
    def seconds_per_step(self) -> float:
        """Predicted time of an optimizer step. Only the order of plans counts if the hardware's
        speed is not known.
        """
        return self.details.time.seconds

    @property
    def seconds_per_step_low(self) -> float:
        """Lower end of the range that holds the measured time in nine of ten cases."""
        return self.details.between(self.seconds_per_step)[0]

    @property
    def seconds_per_step_high(self) -> float:
        """Upper end of that range."""
        return self.details.between(self.seconds_per_step)[1]

    @property
    def tokens_per_second(self) -> float:
        """Predicted throughput of all devices together."""
        return self.details.tokens_per_second

    @property
    def memory(self) -> Memory:
        """Memory budget, in bytes."""
        return Memory(self.details.budget, self.details.plan.hardware)

    @property
    def plan(self) -> Plan:
        """The plan itself.

        Raises:
            TrainctlError: The configuration says no length of the training (`training.tokens`).
        """
        from trainctl.config.overrides import merge_overrides

        arguments = merge_overrides(self._result._arguments, self.overrides)
        return plan(*arguments, config_dir=self._result._config_dir)

    def write(self, path: Place) -> None:
        """Write the plan as a recipe that extends the one it was searched for.

        Raises:
            TrainctlError: No recipe can be written there, or the configuration says no length.
        """
        from trainctl.tuning.recipes import write_plan_recipe

        result = self._result
        folder = _config_dir(result._config_dir)
        write_plan_recipe(Path(path), result._composed, self.details, result.details, folder)

    def to_dict(self) -> dict[str, Any]:
        """Return the form of the plan in `trainctl plan --json`."""
        return self._result.details.plan_to_json(self.details)

    def __repr__(self) -> str:
        from trainctl.monitor.search_text import plan_summary

        return "\n".join(plan_summary(self._result.details, self.details))


def check_deepspeed(
    file: Place,
    *overrides: str,
    hardware: str | None = None,
    world_size: int | None = None,
    model: Place | None = None,
) -> CheckedFile:
    """Check a DeepSpeed JSON, whoever trains with it.

    Args:
        file: The JSON.
        overrides: `hardware=...` and `hardware.KEY=...`, if the machines are known.
        hardware: Machines, such as `8xh100-80g`.
        world_size: Number of ranks; None takes one for each device of the hardware.
        model: A directory of transformers, for the values that depend on the model.

    Returns:
        The file with its findings.

    Raises:
        TrainctlError: The file or the model cannot be read.
    """
    from trainctl.launchers.planning import check_deepspeed_file

    described = _with_hardware(overrides, hardware)
    return check_deepspeed_file(Path(file), described, world_size=world_size, model=_folder(model))


def import_config(
    *files: Place, tool: str | None = None, world_size: int | None = None
) -> ImportResult:
    """Convert a configuration of another trainer to overrides, or to a recipe.

    Args:
        files: DeepSpeed's JSON, or a YAML, JSON, TOML file or training_args.bin of a program that
            has a table; several if the program merges them, as GPT-NeoX does.
        tool: The program, such as `axolotl`; None detects it by the file's keys.
        world_size: Number of ranks that its batch sizes are for; None takes what the file says.

    Returns:
        The result: `overrides`, `recipe` as text, `carried` and `left_out` for the file's keys, and
        in `missing` what must be added before the recipe validates.

    Raises:
        TrainctlError: The file cannot be read, is of no known program or of several, or is not
            valid for DeepSpeed.
    """
    from trainctl.migration.configs.import_file import import_file

    return import_file(*map(Path, files), tool=tool, world_size=world_size)


def check_machine(
    *overrides: str, hardware: str | None = None, config_dir: Place | None = None
) -> MachineReport:
    """Check whether this machine can run a configuration: packages, compilers, limits, devices.

    Args:
        overrides: As of `plan`; without any, what every run needs is looked for.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Raises:
        TrainctlError: The configuration is wrong.
    """
    from trainctl.config.overrides import split_target
    from trainctl.launchers.machine_report import examine
    from trainctl.launchers.planning import compose_target

    target, rest = split_target(_with_hardware(overrides, hardware))
    return examine(compose_target(target, rest, _config_dir(config_dir)))


def list_recipes(config_dir: Place | None = None) -> list[dict[str, Any]]:
    """Return each recipe with its hardware and whether this machine can launch it.

    `fits_here` is None if that is too close to tell; `reason` says why it is not True.
    """
    from trainctl.launchers.machine_report import recipe_verdicts

    return recipe_verdicts(_config_dir(config_dir))


# Runs

Event = dict[str, Any]

_POLL_SECONDS = 0.2

_LEAST_BUCKETS = 64


def launch(
    *overrides: Plan | str,
    hardware: str | None = None,
    run_dir: Place | None = None,
    resume: bool = False,
    force: bool = False,
    wait: bool = True,
    progress: OnEvent | Observer | None = None,
    config_dir: Place | None = None,
    script_arguments: list[str] | None = None,
    argv: Sequence[str] | None = None,
) -> Run:
    """Check a configuration against the machines, and train it in processes of their own.

    In the main thread the launch is supervised here: Ctrl-C has the run save and end, and the end
    of this process ends it. In another thread, or without `wait`, a launcher in the background
    supervises it. With `launcher=slurm` or `kubernetes` the call returns once the scheduler has the
    run.

    Args:
        overrides: A plan, or what `plan` takes. Either is checked once more, with its files.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        run_dir: Directory of the run; None makes one under `runs/`.
        resume: Resume the run in `run_dir`, with this configuration, if there is one.
        force: Start although the budget does not fit.
        wait: Return when the run has ended. Otherwise return at once; the run outlives this
            process.
        progress: Called with each record of the run (docs/records.md), while this call waits.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        script_arguments: Arguments of `script=...`, in place of configured ones.
        argv: Command line for the run's own record; None records the overrides.

    Returns:
        The run, which has ended well, has saved and stopped on request, or goes on.

    Raises:
        TrainctlError: The plan is refused or the machines are not what it needs, and no run was
            made; `findings` has every problem. As `RunFailed`: the run failed; `log_tail` has the
            end of the log that tells why.
        KeyboardInterrupt: Ctrl-C; the run has saved, if it had made a step, and ended.
    """
    from trainctl.config.user_code import with_script_arguments
    from trainctl.launchers import start

    began = time.time()
    if resume and run_dir is None:
        raise TrainctlError("--resume auto needs --run-dir, the directory to look in")
    composed = with_script_arguments(_composed(overrides, hardware, config_dir), script_arguments)
    paths = start.start_run(
        composed,
        run_dir=_folder(run_dir),
        resume=resume,
        argv=["trainctl.launch", *composed.overrides] if argv is None else argv,
        force=force,
        wait=wait,
        began=began,
        observer=progress if isinstance(progress, start.Observer) else start.Observer(progress),
    )
    return Run(paths.root)


def _composed(
    overrides: Sequence[Plan | str], hardware: str | None, config_dir: Place | None
) -> ComposedConfig:
    """Return the configuration of a plan, or compose what `plan` takes."""
    from trainctl.config.overrides import split_target
    from trainctl.launchers import planning

    first, *rest = overrides or ("",)
    if isinstance(first, Plan):
        if rest or hardware is not None or config_dir is not None:
            raise TrainctlError(
                "a plan has its overrides and folder already",
                hint="launch(plan.with_(...)) changes them",
            )
        return first.details.composed
    target, words = split_target(_with_hardware(overrides, hardware))
    return planning.compose_target(target, words, _config_dir(config_dir))


def resume(
    run: Run | Place,
    *overrides: str,
    step: int | None = None,
    attempt: int | None = None,
    from_start: bool = False,
    prove_first: bool = False,
    force: bool = False,
    wait: bool = True,
    progress: OnEvent | Observer | None = None,
    config_dir: Place | None = None,
    script_arguments: list[str] | None = None,
    run_dir: Place | None = None,
    trust_code: bool = False,
) -> Run:
    """Continue a run as a new attempt, from its newest complete checkpoint.

    A run without a checkpoint begins again. Where no step is left, nothing happens. See `launch`.

    Args:
        run: A run, its directory, or the URL of its mirror, from which `fetch` makes a directory.
        overrides: Changes of its configuration.
        step: Continue from the checkpoint after so many steps, and leave later ones behind.
        attempt: Attempt whose configuration to take; None is the newest that got going.
        from_start: Begin again, and leave all checkpoints behind.
        prove_first: Resume only if a replayed step differs by rounding at most (`prove`).
        force: Start although the budget does not fit.
        wait: Return when the run has ended; otherwise at once.
        progress: Called with each record of the run, while this call waits.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        script_arguments: Arguments of the run's script, in place of the ones it had.
        run_dir: Directory to make from a mirror; None makes one in `runs/`.
        trust_code: Run what a mirror's configuration names; see `fetch`.

    Raises:
        TrainctlError: It is no run, in use, or the plan is refused. As `RunFailed`: it failed.
        KeyboardInterrupt: Ctrl-C; the run has saved and ended.
    """
    from trainctl.launchers import start

    began, run = time.time(), _opened_or_fetched(run, run_dir, step, trust_code)
    configure = partial(_recomposed, overrides, _config_dir(config_dir), script_arguments)
    observer = progress if isinstance(progress, start.Observer) else start.Observer(progress)
    if prove_first:
        from trainctl.launchers.prove import require_proof

        place = None if from_start else (step, attempt)
        require_proof(run.paths, configure, changes=overrides, place=place, say=observer.proving)
    start.resume_run(
        run.paths,
        configure,
        step=step,
        attempt=attempt,
        from_start=from_start,
        force=force,
        wait=wait,
        began=began,
        observer=observer,
    )
    return run


def _recomposed(
    overrides: Sequence[str],
    config_dir: Path | None,
    script_arguments: list[str] | None,
    before: RunConfig,
) -> ComposedConfig:
    from trainctl.config.compose import recompose
    from trainctl.config.user_code import with_script_arguments

    composed = recompose(before, overrides, config_dir=config_dir)
    return with_script_arguments(composed, script_arguments)


def import_checkpoint(
    directory: Place,
    run_dir: Place,
    *overrides: str,
    format: str | None = None,
    hardware: str | None = None,
    progress: Progress | None = None,
    config_dir: Place | None = None,
    argv: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Make a run from a checkpoint of another trainer, with its optimizer states.

    `resume` then continues it, on any layout. Files are read in pieces, and no code in them is run.

    Args:
        directory: Directory of the checkpoint.
        run_dir: Directory of the run to make, or of a run without checkpoints.
        overrides: As of `plan`; none if the run is there.
        format: Format of the checkpoint (docs/coming-from.md); None detects it.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        progress: Called with the name of a piece of work, the units done, and their total.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        argv: Command line for the run's own record; None records the overrides.

    Returns:
        What `trainctl checkpoint import --json` prints: `run`, `checkpoint`, `step`, `samples`,
        `tokens`, in `notes` what is unknown or differs from the configuration, and in `unchecked`
        what cannot be checked about the files.

    Raises:
        TrainctlError: The configuration is wrong; or the checkpoint is damaged, or of another model
            or optimizer (exit code 5).
    """
    from trainctl.launchers import offline
    from trainctl.runs.directory import is_run

    named = is_run(Path(run_dir)) and not overrides and hardware is None
    composed = None if named else _composed(overrides, hardware, config_dir)
    recorded = ["trainctl.import_checkpoint", str(directory), str(run_dir), *overrides]
    return offline.import_checkpoint(
        Path(directory),
        Path(run_dir),
        composed,
        format=format,
        argv=recorded if argv is None else argv,
        progress=progress or _ignore,
    )


def prove(
    run: Run | Place,
    *changes: str,
    steps: int = 2,
    checkpoint: int | None = None,
    python: Place | None = None,
    say: Callable[[str], None] | None = None,
    config_dir: Place | None = None,
) -> Proof:
    """Prove that a change computes the same: replay steps with and without it, and compare.

    Each replay is a launch of its own beside the run, which gets nothing but the result's file.

    Args:
        run: A run with a checkpoint, or its directory.
        changes: Overrides, as of `resume`: another layout, precision, kernel or engine. Without
            any, the same is replayed twice.
        steps: Number of steps to replay; at least 1.
        checkpoint: Step of the checkpoint; None takes the newest with as many steps left.
        python: Interpreter of another environment, which makes the second replay: another torch or
            DeepSpeed.
        say: Called with a sentence as each replay begins.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Returns:
        The verdict, the first tensor that differs by more than rounding, and each step.

    Raises:
        TrainctlError: There is no such checkpoint, or the change is not legal or changes which
            samples a step has. As `RunFailed`: a replay failed.
    """
    from trainctl.launchers import prove as proofs

    if steps < 1:
        raise TrainctlError(f"--steps {steps} replays nothing", hint="--steps 1")
    return proofs.prove(
        (run if isinstance(run, Run) else Run(run)).paths,
        partial(_recomposed, changes, _config_dir(config_dir), None),
        changes=changes,
        steps=steps,
        checkpoint=checkpoint,
        python=None if python is None else Path(python).absolute(),
        say=say or _ignore,
    )


def prove_migration(
    directory: Place,
    *overrides: str,
    losses: Place | None = None,
    steps: int = 2,
    hardware: str | None = None,
    say: Callable[[str], None] | None = None,
    progress: Progress | None = None,
    config_dir: Place | None = None,
) -> MigrationProof:
    """Prove that a configuration continues another trainer's run: make steps again that it logged.

    The newest checkpoint with logged losses after it is imported into a temporary run, which trains
    as far as these losses. Nothing is left of it.

    Args:
        directory: The folder that the other trainer saved in, or that of one checkpoint.
        overrides: The configuration that is to continue it, as of `plan`; the first may be a run.
        losses: Log of the losses: a `trainer_state.json`, or a .csv (docs/prove.md). None takes the
            longest `trainer_state.json` of the folder.
        steps: Number of logged losses to compare; at least 1. One may be a mean over several steps.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        say: Called with a sentence as the replay begins.
        progress: Called with the name of a piece of work, the units done, and their total.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Returns:
        The verdict, each loss beside the logged one, and what explains a difference.

    Raises:
        TrainctlError: No loss was logged after a checkpoint; or the configuration is wrong; or the
            checkpoint is damaged, or of another model or optimizer. As `RunFailed`: the replay
            failed.
    """
    from trainctl.launchers import migration_proof

    if steps < 1:
        raise TrainctlError(f"--steps {steps} compares nothing", hint="--steps 1")
    return migration_proof.prove_migration(
        Path(directory),
        _composed(overrides, hardware, config_dir),
        log=None if losses is None else Path(losses),
        steps=steps,
        say=say or _ignore,
        progress=progress or _ignore,
    )


def trial(
    run: Run | Place,
    *overrides: str,
    step: int,
    devices: int = 3,
    say: Callable[[str], None] | None = None,
    config_dir: Place | None = None,
) -> Trial:
    """Compute a step of a run again on other devices, bit for bit, and name one that differs.

    The run is replayed from the checkpoint before the step, beside it and on its own layout. Each
    data-parallel share of the step is then computed on several devices.

    Args:
        run: A run, or its directory.
        overrides: Changes of the replay: other hosts, another layout. It computes
            deterministically, unless `training.deterministic=false` is among them.
        step: The step that is suspected, from 1.
        devices: Number of devices that compute each share; at least 1. Three tell which is wrong.
        say: Called with a sentence as the replay begins.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Returns:
        The verdict, the devices that differ, and the override that leaves them out.

    Raises:
        TrainctlError: The run has no such step, or its samples cannot be computed apart. As
            `RunFailed`: the replay failed.
    """
    from trainctl.launchers.trial import compare_devices

    if devices < 1:
        raise TrainctlError(f"--devices {devices} computes nothing", hint="--devices 3")
    changes = ("training.deterministic=true", *overrides)
    return compare_devices(
        (run if isinstance(run, Run) else Run(run)).paths,
        partial(_recomposed, changes, _config_dir(config_dir), None),
        step=step,
        devices=devices,
        say=say or _ignore,
    )


def suspects(
    run: Run | Place,
    *overrides: str,
    step: int,
    by: Literal["loss", "grad_norm"] | None = None,
    most: int = 8,
    force: bool = False,
    say: Callable[[str], None] | None = None,
    config_dir: Place | None = None,
) -> Suspects:
    """Name the documents that carry a spike: replay its step with halves of the batch left out.

    The run is replayed from the checkpoint before the step, beside it and on its own layout. All
    repetitions of the step are in this one launch; a document among n takes log2(n) + 2 of them.

    Args:
        run: A run, or its directory.
        overrides: Changes of the replay: other hosts, another layout.
        step: The step with the spike, from 1.
        by: The quantity with the spike; None takes the one that stands out more in the records.
        most: Maximum number of documents to name; at least 1.
        force: Whether to search where the value stands out by less than 3 standard deviations.
        say: Called with the spike, and with a sentence as the replay begins.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Returns:
        The documents, each with its share of the spike, and the value without them.

    Raises:
        TrainctlError: The records have no spike there, or its samples cannot be told apart. As
            `RunFailed`: the replay failed.
    """
    from trainctl.launchers.suspects import QUANTITIES, find_suspects

    if most < 1:
        raise TrainctlError(f"--most {most} names nothing", hint="--most 8")
    if by is not None and by not in QUANTITIES:
        raise TrainctlError(f"--by {by} is no quantity of a step", hint="--by loss, --by grad_norm")
    return find_suspects(
        (run if isinstance(run, Run) else Run(run)).paths,
        partial(_recomposed, overrides, _config_dir(config_dir), None),
        step=step,
        by=by,
        most=most,
        force=force,
        say=say or _ignore,
    )


def _opened_or_fetched(
    run: Run | Place, run_dir: Place | None, step: int | None, trust_code: bool
) -> Run:
    if isinstance(run, str) and _is_url(run):
        return fetch(run, run_dir, step=step, trust_code=trust_code)
    if run_dir is not None:
        raise TrainctlError(
            f"{run} is a run's directory, which stays where it is",
            hint="--run-dir is the directory to make from a mirror's URL",
        )
    return run if isinstance(run, Run) else Run(run)


def fetch(
    url: str,
    run_dir: Place | None = None,
    *,
    step: int | None = None,
    trust_code: bool = False,
    progress: Progress | None = None,
) -> Run:
    """Make a run directory from a mirror (`checkpoint.mirror`), with one checkpoint, to resume it.

    Args:
        run_dir: The directory; None makes one in `runs/` with the name that the run had.
        step: Step of the checkpoint; None takes the newest.
        trust_code: Accept a run whose configuration names functions or programs that later calls
            run (`model.factory`, `script`, `launcher.environment`, ...).
            `TRAINCTL_TRUST_CODE=1` in the environment does too.
        progress: Called with the name of a piece of work, the units done, and their total.

    Raises:
        TrainctlError: There is no such mirror or checkpoint, the directory exists, or what is there
            is damaged (exit code 5); the run names code that is not trusted (exit code 2); or the
            store cannot be read (exit code 4).
    """
    from trainctl.config.registry import environment_trusts_code
    from trainctl.mirror.fetch import fetch_run

    made = fetch_run(
        url,
        run_dir=_folder(run_dir),
        step=step,
        trusts_code=trust_code or environment_trusts_code(),
        progress=progress or _ignore,
    )
    return Run(made.root)


@contextmanager
def opened_run(
    run: Place,
    *,
    step: int | None = None,
    best: bool = False,
    trust_code: bool = False,
    weights: bool = True,
    progress: Progress | None = None,
) -> Iterator[Run]:
    """Give the run in a directory; of a mirror's URL, a copy with one checkpoint, which is removed.

    Args:
        step: Step of the checkpoint that is used; None takes the newest.
        best: Whether it is the one with the lowest held-out loss.
        trust_code: As of `fetch`.
        weights: Whether the copy needs the tensors. Without them a resume can be planned from it.
        progress: Called with the name of a piece of work, the units done, and their total.
    """
    if not _is_url(str(run)):
        yield Run(run)
        return
    from trainctl.config.registry import environment_trusts_code
    from trainctl.mirror.fetch import fetched_checkpoint, fetched_plan

    trusts_code = trust_code or environment_trusts_code()
    fetched = (
        partial(fetched_checkpoint, best=best, progress=progress or _ignore)
        if weights
        else fetched_plan
    )
    with fetched(str(run), step=step, trusts_code=trusts_code) as copy:
        yield Run(copy.root)


def list_checkpoints(run: Place) -> list[dict[str, Any]]:
    """Return the facts of each checkpoint of a directory or a mirror, as `checkpoint ls --json`."""
    from trainctl.mirror.fetch import Mirror
    from trainctl.runs.checkpoint_selection import describe_checkpoints

    return (
        Mirror(str(run)).describe() if _is_url(str(run)) else describe_checkpoints(Run(run).paths)
    )


def verify_checkpoints(
    run: Place, *, step: int | None = None, progress: Progress | None = None
) -> list[dict[str, Any]]:
    """Read every byte of the checkpoints of a directory or a mirror.

    Args:
        step: Step of the only checkpoint to verify; None verifies all.
        progress: Called with the name of a piece of work, the units done, and their total.

    Returns:
        `step`, `path` and `problems` of each; no problems if it is intact.
    """
    from trainctl.mirror.fetch import Mirror
    from trainctl.runs.checkpoint_selection import select_checkpoints, verify_checkpoint

    show = progress or _ignore
    if _is_url(str(run)):
        return Mirror(str(run)).verify_all(step, show)
    paths = Run(run).paths
    return [
        {"step": at, "path": str(path), "problems": verify_checkpoint(paths, path, show)}
        for at, path in select_checkpoints(paths, None if step is None else [step])
    ]


def _is_url(place: str) -> bool:
    from trainctl.readers.remote import is_url

    return is_url(place)


def sweep(
    *overrides: str,
    sweep_dir: Place | None = None,
    resume: bool = False,
    parallel: int | None = None,
    force: bool = False,
    config_dir: Place | None = None,
    observer: SweepObserver | None = None,
    argv: Sequence[str] | None = None,
) -> Path:
    """Train every combination of several values (`optimizer.lr=1e-4,3e-4`), and wait for all.

    Every combination is planned and checked before the first one starts. A run that fails does not
    keep the others from running; the runs' `status` tells. With `launcher=slurm` the call returns
    once the scheduler has the runs, as one array.

    Args:
        overrides: A configuration, whose first word may be a recipe; none with `resume`.
        sweep_dir: The sweep's folder; None makes one under `sweeps/`.
        resume: Start what is new in the folder and resume what was interrupted.
        parallel: Runs at a time; None is one here, and all in a scheduler's array.
        force: Start although a budget does not fit.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        observer: Receiver of the sweep's phases, as the command has one.
        argv: Command line for the runs' own records; None records the overrides.

    Returns:
        The sweep's folder, in which `list_runs` finds the runs.

    Raises:
        TrainctlError: A plan is refused, and no run was made; or the sweep is still running.
    """
    from trainctl.config.overrides import recipe_as_override
    from trainctl.launchers import sweep as sweeps

    overrides = tuple(recipe_as_override(overrides))
    watching = observer or sweeps.SweepObserver()
    recorded = ["trainctl.sweep", *overrides] if argv is None else argv
    if resume:
        if sweep_dir is None or overrides:
            raise TrainctlError("a sweep is resumed as it was made: its folder says how")
        folder = Path(sweep_dir).resolve()
        sweeps.resume_sweep(
            folder, parallel=parallel, force=force, argv=recorded, observer=watching
        )
        return folder
    return sweeps.start_sweep(
        overrides,
        sweep_dir=_folder(sweep_dir),
        parallel=parallel,
        force=force,
        config_dir=_config_dir(config_dir),
        argv=recorded,
        observer=watching,
    )


def list_runs(folder: Place = "runs") -> list[Run]:
    """Return the runs in a folder, oldest first; damaged ones are left out."""
    from trainctl.runs.directory import runs_in

    return [Run(paths.root) for paths in runs_in(Path(folder))]


class Run:
    """A run directory, whoever launched the run: live or ended, here or on another machine.

    Every property reads the directory again.

    Args:
        path: The directory.

    Raises:
        TrainctlError: The directory is no run (exit code 5).
    """

    def __init__(self, path: Place) -> None:
        from trainctl.runs.directory import open_run

        if _is_url(str(path)):
            raise TrainctlError(
                f"{path} is a URL, and this needs a run directory",
                hint=f"trainctl resume {path} makes one from a mirror; in Python, trainctl.fetch",
            )
        self.paths = open_run(Path(path))

    @classmethod
    def newest(cls, folder: Place = "runs") -> Run:
        """Return the run of a folder that was made last.

        Raises:
            TrainctlError: There is no run (exit code 5).
        """
        from trainctl.runs.directory import newest_run

        return cls(newest_run(Path(folder)).root)

    def __repr__(self) -> str:
        from trainctl.runs.listing import summarise_run

        try:
            state = str(summarise_run(self.paths))
        except TrainctlError as error:  # it was removed, say
            state = error.message
        return f"Run({str(self.path)!r}): {state}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and other.path == self.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def path(self) -> Path:
        """Run directory."""
        return self.paths.root

    @property
    def status(self) -> RunStatus:
        """State, step, loss, exit code and first failure of the newest attempt.

        A run that died when all was saved is written down as finished.
        """
        from trainctl.launchers.processes import settle_run
        from trainctl.runs.listing import status_of

        settle_run(self.paths)
        return status_of(self.paths)

    @property
    def plan(self) -> Plan:
        """The plan of the newest attempt that got going, made again from its configuration."""
        return plan(str(self.path))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints, oldest first: damaged ones and those with the weights alone as well."""
        from trainctl.runs.checkpoints import checkpoint_folders

        full, alone = (checkpoint_folders(self.paths, weights_only=each) for each in (False, True))
        return [Checkpoint(self, step) for step in sorted({step for step, _ in full + alone})]

    def wait(self, timeout: float | None = None) -> RunStatus:
        """Wait until the run has ended, and return how. A run that failed does not raise.

        Args:
            timeout: Seconds to wait at most; None waits for ever.

        Raises:
            TimeoutError: It has not ended by then.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._is_live():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.path} has not ended after {timeout:g} s")
            time.sleep(_POLL_SECONDS)
        return self.status

    def _is_live(self) -> bool:
        from trainctl.runs.listing import summarise_run

        return summarise_run(self.paths).is_live

    def follow(self, *, from_start: bool = True) -> Iterator[Event]:
        """Yield the records of the run as they are written, until it has ended.

        Args:
            from_start: Begin with the first record of the newest attempt; otherwise with those
                that are written from now on.
        """
        from trainctl.runs.directory import last_attempt
        from trainctl.runs.records import EventFollower

        follower = EventFollower(self.paths.events, from_start=from_start)
        return self._follow(follower, last_attempt(self.paths))

    def _follow(self, follower: EventFollower, first: int) -> Iterator[Event]:
        while True:
            is_live = self._is_live()  # before the poll: the last records precede the end
            while events := follower.poll():
                yield from (event for event in events if event["attempt"] >= first)
            if not is_live:
                return
            time.sleep(_POLL_SECONDS)

    def events(self, *kinds: str) -> Iterator[Event]:
        """Yield the records of these kinds (all, if none is named) in the order of their writing.

        Steps that were repeated after a resume come twice; `metrics` has those that count.
        """
        from trainctl.runs.records import iter_events

        return iter_events(self.paths.events, *kinds)

    def metrics(self, as_: Literal["pandas", "arrow"] = "pandas") -> Any:
        """Return the steps of all attempts as a table, one row a step.

        Steps that were repeated after a resume or a rewind are there once, as they count. Columns:
        `step`, `attempt`, `time` (Unix seconds), `loss` (nats a token), `learning_rate`,
        `grad_norm`, `tokens` (since the run's start), `tokens_per_second`, `mfu`, parts such as
        `seconds/forward` and `peak/device`, and of evaluations `held_out/loss` and its parts, in
        the row of the step before them; NaN where a step has no such number.

        Args:
            as_: `pandas` for a DataFrame, `arrow` for a table of pyarrow.

        Raises:
            TrainctlError: That package is not installed (exit code 4).
        """
        from trainctl.monitor.report.history import History

        _require_one_of("as_", as_, ("pandas", "arrow"))
        history = History(self.paths)
        history.read()
        steps = history.steps
        whole = ("step", "attempt")
        columns: dict[str, Any] = {name: steps[name].astype("int64") for name in whole}
        columns |= {name: steps[name] for name in steps.names if name not in whole}
        columns |= history.held_out()
        if as_ == "pandas":
            return data_frame(columns)
        try:
            import pyarrow
        except ImportError as missing:
            from trainctl.config.extras import install_command

            raise MachineError(
                f"a table of arrow needs pyarrow, which cannot be imported ({missing})",
                hint=install_command("pyarrow"),
            ) from None
        return pyarrow.table(columns)

    def stop(self, *, now: bool = False, wait: bool = True) -> RunStatus:
        """Have the run save at its next step and end, on whatever machines it trains.

        Nothing happens to a run that has ended.

        Args:
            now: End it at once, without saving.
            wait: Return when it has ended.
        """
        from trainctl.launchers.stop import ask_to_stop, wait_for_end

        if self._is_live():
            ask_to_stop(self.paths, now=now)
            if wait:
                wait_for_end(self.paths, now=now)
        return self.status

    def logs(
        self, *, attempt: int | None = None, ranks: Sequence[int] = (), lines: int = 20
    ) -> dict[str, list[str]]:
        """Return the last lines of each log of an attempt, by the name of its process.

        Args:
            attempt: Number of the attempt; None is the newest.
            ranks: Only logs of these ranks.
        """
        from trainctl.runs.directory import last_attempt
        from trainctl.runs.logs import logs_of, tail_logs

        number = last_attempt(self.paths) if attempt is None else attempt
        found = logs_of(self.paths.attempt(number), ranks)
        return {log.label: tail for log, tail in tail_logs(found, lines)}

    def report(self, path: Place = "report.html", *, price: float | None = None) -> Path:
        """Write one HTML file that shows the run: curves, faults, memory, time, layout.

        Args:
            price: Price of one device for an hour.
        """
        from trainctl.monitor.report.page import write_report

        write_report(Path(path), report(self, price=price))
        return Path(path)

    def save(self, say: Callable[[str], None] | None = None) -> Checkpoint:
        """Have the run save at its next step, and return the checkpoint when it is committed.

        Args:
            say: Called with a sentence once the run has been asked.

        Raises:
            TrainctlError: The run does not train, or ended before it saved (exit code 5).
        """
        from trainctl.launchers.stop import save_now

        saved = save_now(self.paths, say or _ignore)
        return Checkpoint(self, int(saved["step"]), path=self.path / saved["path"])

    def remove_checkpoints(
        self, *steps: int, force: bool = False, progress: Progress | None = None
    ) -> list[Path]:
        """Remove checkpoints of a run that is not training, those of the weights alone as well.

        Args:
            force: Also if no intact checkpoint is left then.
            progress: Called while the others are verified.

        Returns:
            The folders that were removed.

        Raises:
            TrainctlError: The run is in use, has no such checkpoint, or would lose its last one.
        """
        from trainctl.runs.checkpoint_selection import require_another, select_checkpoints
        from trainctl.runs.checkpoints import clean_temporary, delete_checkpoint
        from trainctl.runs.lock import hold_lock

        with hold_lock(self.paths):  # keeps a trainer's rotation out
            doomed = [path for _, path in select_checkpoints(self.paths, steps)]
            if not force:
                require_another(self.paths, doomed, progress or _ignore)
            for path in doomed:
                delete_checkpoint(self.paths, path)
            clean_temporary(self.paths)
        return doomed

    def checkpoint(
        self,
        step: int | None = None,
        *,
        best: bool = False,
        warn: Callable[[str], None] | None = None,
    ) -> Checkpoint:
        """Return a checkpoint, by default the newest that is intact when it is used.

        Args:
            step: Step of the checkpoint.
            best: Take the one with the lowest held-out loss.
            warn: Called for each damaged checkpoint that is passed over; None warns as Python does.
        """
        return Checkpoint(self, step, best=best, warn=warn)

    def _repr_html_(self) -> str:
        from trainctl.monitor.report.figure import loss_svg
        from trainctl.monitor.report.history import History

        status = self.status
        rows = {
            "run": str(self.path),
            "state": status.shown_state,
            "step": status.steps_text,
            "loss": "" if status.loss is None else f"{status.loss:.4f}",
            "attempt": str(status.attempt),
            "why": status.message,
        }
        history = History(self.paths)
        history.read()
        drawn = loss_svg(history) if len(history.steps) > 1 else ""
        return html_table([row for row in rows.items() if row[1]]) + drawn


class Checkpoint:
    """A checkpoint of a run.

    Its methods read every byte first, and compare it with its checksum. They work in a process of
    their own, so that torch is not loaded here.
    """

    def __init__(
        self,
        run: Run,
        step: int | None = None,
        *,
        best: bool = False,
        warn: Callable[[str], None] | None = None,
        path: Path | None = None,
    ) -> None:
        self.run = run
        self._step, self._best, self._warn, self._path = step, best, warn, path

    def __repr__(self) -> str:
        which = "best" if self._best else "newest" if self._step is None else f"step {self._step:,}"
        return f"Checkpoint({str(self.run.path)!r}, {which})"

    @property
    def path(self) -> Path:
        """Checkpoint folder, which is not verified.

        Raises:
            TrainctlError: There is no such checkpoint (exit code 5).
        """
        from trainctl.runs.checkpoint_selection import candidates

        if self._path is not None:  # of a record: a run that goes on may remove it
            return self._path
        return candidates(self.run.paths, step=self._step, best=self._best)[0]

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        return int(self.path.name.rpartition("-")[2])

    @property
    def is_complete(self) -> bool:
        """Whether all its files are there, with their sizes; `verify` reads them."""
        from trainctl.runs.manifest import read_manifest

        try:
            read_manifest(self.path)
        except ValueError:
            return False
        return True

    def verify(self, progress: Progress | None = None) -> list[str]:
        """Read every byte, and return the problems: empty if it is intact."""
        from trainctl.runs.checkpoint_selection import verify_checkpoint

        return verify_checkpoint(self.run.paths, self.path, progress or _ignore)

    def export(
        self,
        out: Place | None = None,
        *,
        to: str = "transformers",
        dtype: str | None = None,
        weights: str = "raw",
        adapter: bool | None = None,
        shard_size: str | int | None = None,
        check: bool = False,
        card: bool = False,
        public: bool = False,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Write a directory that transformers loads, or another format, or upload one to the hub.

        Args:
            out: A new or empty folder; a new file of `gguf`. None uploads from a temporary folder.
            to: Format, as `trainctl export --to` names it; `hub:USER/NAME` uploads, by `HF_TOKEN`.
            dtype: `fp32`, `bf16` or `fp16`, and `q8_0` of `gguf`; None is the format that the run
                trains in.
            weights: `raw`, or `ema` for their moving average.
            adapter: True writes the adapter alone, as PEFT loads it; otherwise it is merged into
                its base, and False refuses a run without one.
            shard_size: Largest file of weights, such as `2GB` or a number of bytes.
            check: Load the export by the library that it is for, and compare scores, ids of tokens
                and ends of answers with the checkpoint's; the result's `check` has the numbers. A
                difference is not uploaded.
            card: Also write a model card, README.md, which an upload always has.
            public: Make a public repository; without it one is private.
            progress: Called with the name of a piece of work, the units done, and their total.

        Returns:
            What `trainctl export --json` prints: `out`, `checkpoint`, `files`, `bytes`, `notes`...

        Raises:
            TrainctlError: The checkpoint is damaged (5), the folder is not empty (2), or the upload
                failed (4), of which nothing is committed then.
        """
        from trainctl.launchers.export import export

        return export(
            self._choice(weights, "auto", progress),
            _folder(out),
            to=to,
            public=public,
            dtype=dtype,
            adapter=adapter,
            shard_bytes=None if shard_size is None else _size_in_bytes(shard_size),
            check=check,
            card=card,
        )

    def evaluate(
        self,
        *,
        samples: int | None = None,
        weights: str = "raw",
        device: str = "auto",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Return the held-out loss, in nats a token, with its parts, as `evaluate --json` does.

        Args:
            samples: Held-out samples; None takes the run's own number.
            weights: `raw`, or `ema` for their moving average.
            device: `cpu`, `cuda`, or `auto`: an accelerator with room for the model, else the CPU.
            progress: Called with the name of a piece of work, the units done, and their total.
        """
        from trainctl.launchers.offline import run_task

        choice = self._choice(weights, device, progress)
        return run_task("evaluate", choice, {"samples": samples})

    def evaluate_tasks(
        self,
        *names: str,
        weights: str = "raw",
        device: str = "auto",
        progress: Progress | None = None,
        include: Place | None = None,
        shots: int | None = None,
        samples: int | None = None,
        batch_size: int | None = None,
        chat: bool = False,
        keep: Place | None = None,
    ) -> dict[str, Any]:
        """Evaluate tasks of lm-eval, add the results to the run's records, and return them.

        Args:
            names: Names of tasks.
            weights: `raw`, or `ema` for their moving average.
            device: As of `evaluate`.
            progress: Called with the name of a piece of work, the units done, and their total.
            include: Folder of your own tasks, in lm-eval's YAML.
            shots: Examples before each question; None takes the task's own number.
            samples: Examples of each task; None takes all.
            batch_size: Requests at a time; None takes the run's micro-batch.
            chat: Questions go through the tokenizer's chat template.
            keep: New folder for the export that the tasks run on; None removes it.

        Raises:
            TrainctlError: lm-eval is not installed (4), or a task is unknown.
        """
        from trainctl.launchers.offline import evaluate_tasks

        return evaluate_tasks(
            self._choice(weights, device, progress),
            names,
            include=_folder(include),
            keep=_folder(keep),
            shots=shots,
            samples=samples,
            batch_size=batch_size,
            chat=chat,
        )

    def sample(
        self,
        prompt: str,
        *,
        tokens: int = 128,
        temperature: float = 0.8,
        seed: int | None = None,
        chat: bool | None = None,
        system: str | None = None,
        weights: str = "raw",
        device: str = "auto",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Continue a text, or answer a message; the result's `text` has it.

        Args:
            tokens: Tokens to draw, at most.
            temperature: 0 takes the likeliest token each time.
            seed: Seed of the draws; None takes `training.seed`.
            chat: The prompt is a user's message; None means so for runs whose data are messages.
            system: System message before the prompt.
            weights: `raw`, or `ema` for their moving average.
            device: As of `evaluate`.
            progress: Called with the name of a piece of work, the units done, and their total.
        """
        from trainctl.launchers.offline import run_task

        options: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "temperature": temperature}
        options |= {"seed": seed, "chat": chat, "system": system}
        choice = self._choice(weights, device, progress)
        return run_task("sample", choice, options, prompt=prompt, temperature=temperature)

    def score(
        self,
        text: str,
        *answers: str,
        chat: bool | None = None,
        weights: str = "raw",
        device: str = "auto",
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Return what a reward model or a classifier says of texts: `scored`, a list with the
        `text` and its `scores` by name.

        Args:
            answers: Answers to the text as a prompt; a reward model needs one at least.
            chat: Prompt and answers are messages of a conversation; None means so for runs whose
                data are messages.
            weights: `raw`, or `ema` for their moving average.
            device: As of `evaluate`.
            progress: Called with the name of a piece of work, the units done, and their total.
        """
        from trainctl.launchers.offline import run_task

        options = {"prompt": text, "answers": answers, "chat": chat}
        return run_task("score", self._choice(weights, device, progress), options)

    def _choice(self, weights: str, device: str, progress: Progress | None) -> WeightsChoice:
        from trainctl.launchers.offline import WeightsChoice

        _require_one_of("weights", weights, ("raw", "ema"))
        _require_one_of("device", device, ("auto", "cpu", "cuda"))
        return WeightsChoice(
            run=self.run.paths,
            step=self._step,
            best=self._best,
            weights=weights,
            device=device,
            progress=progress or _ignore,
            warn=self._warn or warnings.warn,
        )


def _size_in_bytes(shard_size: str | int) -> int:
    """Return the size of a weights file, which may have a unit.

    Raises:
        TrainctlError: It is no size.
    """
    from trainctl.config.quantities import in_unit, suffixes
    from trainctl.config.suggest import join_alternatives

    size = in_unit(str(shard_size), "bytes", is_count=True)
    if size is None or size < 1:
        names = join_alternatives(suffixes("bytes", is_count=True))
        raise TrainctlError(
            f"--shard-size {shard_size} is no size",
            hint=f"a number of bytes, or with {names} behind it: --shard-size 2GB",
        )
    return int(size)


def load(
    run: Run | Checkpoint | Place,
    *,
    step: int | None = None,
    best: bool = False,
    weights: str = "raw",
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[Any, Any]:
    """Return the model of a checkpoint or an export, and its tokenizer.

    The model is what transformers loads from the export, or the user's own module with its weights
    (`model=module`), whose function is then imported here. An adapter is merged into its base. A
    checkpoint's weights pass through a temporary folder (TMPDIR).

    Args:
        run: A run (its newest intact checkpoint), its directory, the URL of its mirror, a
            checkpoint, or a directory that was exported.
        step: Step of the run's checkpoint.
        best: The run's checkpoint with the lowest held-out loss.
        weights: `raw`, or `ema` for their moving average.
        dtype: `fp32`, `bf16` or `fp16`; None is the format that the run trains in, or the export's.
        device: Device to load onto, as torch names it.

    Returns:
        The model, in evaluation mode; and a tokenizer of transformers, or trainctl's own (with
        `encode` and `decode`) where the run's has no published files, as bytes have none. None for
        an export without tokenizer files.

    Raises:
        TrainctlError: There is no such checkpoint, or it is damaged (exit code 5).
    """
    from trainctl.runs.files import temporary_folder
    from trainctl.train.export.output import load_export, load_run_export

    _require_one_of("dtype", dtype, _DTYPES)
    if isinstance(run, str) and _is_url(run):
        with opened_run(run, step=step, best=best) as copy:
            return load(copy, step=step, best=best, weights=weights, dtype=dtype, device=device)
    if isinstance(run, Checkpoint) and (step is not None or best):
        raise TrainctlError("a checkpoint is given: leave out step and best")
    if isinstance(run, str | PathLike) and _is_export(Path(run)):
        if step is not None or best or weights != "raw":
            raise TrainctlError(
                f"{run} is an export, which has one set of weights",
                hint="leave out step, best and weights, or name the run",
            )
        model, tokenizer = load_export(Path(run), dtype)
        return model.to(device), tokenizer
    if isinstance(run, Checkpoint):
        checkpoint = run
    else:
        checkpoint = (run if isinstance(run, Run) else Run(run)).checkpoint(step, best=best)
    with temporary_folder() as folder:
        exported = checkpoint.export(folder / "model", dtype=dtype, weights=weights)
        model, tokenizer = load_run_export(
            checkpoint.run.paths, Path(exported["out"]), exported["dtype"]
        )
    return model.to(device), tokenizer


def _is_export(folder: Path) -> bool:
    """Return True if a directory is an export: of a model of transformers, or of a module."""
    return any((folder / name).is_file() for name in ("config.json", "module.json"))


def report(
    *runs: Run | Place,
    form: Literal["html", "json", "csv"] = "html",
    price: float | None = None,
    buckets: int | None = None,
) -> str:
    """Return a report of one or several runs: curves, faults, memory, time, layout.

    Args:
        runs: Runs, their directories, or folders of sweeps; without any, the newest run.
        form: `html` is one page that needs no network; `json` and `csv` have the same numbers.
        price: Price of one device for an hour: adds the cost.
        buckets: Most points of each curve, at least 64; 0 keeps every step. None is as many as a
            page of 2 MB bears.

    Raises:
        TrainctlError: A path is not a run (exit code 5), or there are too many runs.
    """
    import csv
    import io
    import json

    from trainctl.monitor.report.document import (
        read_histories,
        report_document,
        report_rows,
        title_of,
    )
    from trainctl.monitor.report.page import RUNS_PAGE

    _require_one_of("form", form, ("html", "json", "csv"))
    if buckets is not None and 0 < buckets < _LEAST_BUCKETS:
        raise TrainctlError(
            f"--buckets {buckets} is too few for a curve",
            hint=f"at least {_LEAST_BUCKETS}, or 0 for every step",
        )
    if price is not None and not math.isfinite(price):
        raise TrainctlError(f"--price {price} is no price")
    histories = read_histories([run.path if isinstance(run, Run) else Path(run) for run in runs])
    made = report_document(histories, price=price, most=buckets, is_packed=form == "html")
    if form == "html":
        return RUNS_PAGE.html(made, title=title_of(histories))
    if form == "json":
        return json.dumps(made, ensure_ascii=False, allow_nan=False) + "\n"
    stream = io.StringIO()
    cells = (["" if value is None else value for value in row] for row in report_rows(made))
    csv.writer(stream, lineterminator="\n").writerows(cells)
    return stream.getvalue()


def add_tokens(
    directory: Place,
    out: Place,
    *tokens: str,
    multiple_of: int = 1,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write a transformers directory again with more special tokens.

    Each of them gets a row in the embedding and in the output projection, the mean of those before.

    Args:
        directory: A transformers directory with weights.
        out: A new or empty folder.
        multiple_of: Add rows up to a multiple of it, as tensor ranks may want.
        progress: Called with the name of a piece of work, the units done, and their total.

    Returns:
        What `trainctl add-tokens --json` prints: `ids`, `known`, `rows_before`, `rows`...
    """
    from trainctl.launchers.offline import require_new, run_offline

    require_new(Path(out))
    places = {"directory": Path(directory).absolute(), "out": Path(out).absolute()}
    options = {**places, "tokens": tokens, "multiple_of": multiple_of}
    return run_offline("add-tokens", options, progress or _ignore)


_DTYPES = (None, "fp32", "bf16", "fp16")


def _require_one_of(name: str, value: object, known: Sequence[str | None]) -> None:
    if value not in known:
        names = ", ".join(each for each in known if each is not None)
        raise TrainctlError(f"{name}={value!r} is none of {names}")


def _ignore(*_: object) -> None:
    pass
