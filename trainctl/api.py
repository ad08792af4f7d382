"""The Python API: what the commands do, as functions that return objects.

Nothing here prints or exits. A user's mistake is a `TrainctlError` with `findings`. Everything is
imported in the function that needs it: `import trainctl.api` loads no other room but `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from trainctl.errors import ExitCode, Finding, TrainctlError

if TYPE_CHECKING:
    import pandas

    from trainctl.config.compose import ComposedConfig
    from trainctl.hardware import Hardware
    from trainctl.launchers.machine_report import MachineReport
    from trainctl.launchers.planning import PlannedConfig
    from trainctl.memory.budget import MemoryBudget
    from trainctl.rules.registry import CheckedFile
    from trainctl.tuning.search import FoundPlan, Search
    from trainctl.tuning.suggest import Suggestion
    from trainctl.tuning.value_explanation import Explanation

__all__ = [
    "Checkpoint",
    "Finding",
    "Plan",
    "Run",
    "SearchResult",
    "TrainctlError",
    "launch",
    "list_runs",
    "load",
    "plan",
    "resume",
    "search",
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
        files: Also check the files that the configuration names, as before a launch.
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
    composed = planning.compose_target(target, rest, _folder(config_dir), attempt=attempt)
    settings = {"files": files, "exact": exact, "calibrated": calibrated}
    planned = planning.plan_config(composed, with_files=files, exact=exact, calibrated=calibrated)
    if planned.assessment.plan is None or planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    again = {"config_dir": config_dir, "attempt": attempt, **settings}
    return Plan(planned, (*([target] if target else []), *rest), again)


def _with_hardware(overrides: Sequence[str], hardware: str | None) -> tuple[str, ...]:
    return (*overrides, *([f"hardware={hardware}"] if hardware is not None else []))


def _folder(place: Place | None) -> Path | None:
    return None if place is None else Path(place)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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
        from trainctl.tuning.suggest import suggest_fitting, suggest_for_slack

        suggest = suggest_fitting if self.details.errors else suggest_for_slack
        return suggest(self.details.composed.config, self.details.hardware)

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
        raise TrainctlError(
            f"a data frame needs pandas, which cannot be imported ({missing})",
            hint="pip install pandas",
            exit_code=ExitCode.environment,
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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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
    *overrides: str,
    hardware: str | None = None,
    top: int = 5,
    config_dir: Place | None = None,
) -> SearchResult:
    """Search the fastest layouts, batches and recomputation that are legal and fit.

    Groups and keys that are given stay as they are: `zero_stage=3` plans with ZeRO 3 only.

    Args:
        overrides: As of `plan`. A first word without `=` is a recipe or a run, else a model; a
            model alone is planned for 4 million tokens a step unless
            `training.global_batch_tokens` or `training.global_batch_size` says another batch.
        hardware: Machines, such as `8xh100-80g`; short for the override `hardware=...`.
        top: Number of plans, each with another layout.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Raises:
        TrainctlError: The configuration is not legal, or nothing fits (`exit_code` 3).
    """
    from trainctl.config.overrides import split_target
    from trainctl.launchers import plan_search

    target, rest = split_target(_with_hardware(overrides, hardware))
    composed = plan_search.compose_search(target, rest, _folder(config_dir))
    composed, found = plan_search.search_plans(composed, top=top)
    return SearchResult(composed, found, config_dir)


class SearchResult(Sequence["RankedPlan"]):
    """Plans that a search found, the fastest first; among equally fast ones, the simplest."""

    def __init__(self, composed: ComposedConfig, details: Search, config_dir: Place | None) -> None:
        """Made by `search`."""
        self.details = details
        """Result as the commands use it. Not part of the public API."""
        self._composed = composed
        self._config_dir = config_dir

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the configuration that was searched for."""
        return self._composed.overrides

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Warnings of the configuration that was searched for."""
        return self._composed.findings

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

        return "\n".join(search_lines(self.details))

    def _repr_html_(self) -> str:
        from trainctl.monitor.report.figure import chart_element, plan_figure

        chart = chart_element(lambda: plan_figure(self.details))
        return f"<pre>{escape(repr(self))}</pre>{chart}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
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

        composed, more = self._result._composed, self.overrides
        return plan(*merge_overrides(composed.overrides, more), config_dir=self._result._config_dir)

    def write(self, path: Place) -> None:
        """Write the plan as a recipe that extends the one it was searched for.

        Raises:
            TrainctlError: No recipe can be written there, or the configuration says no length.
        """
        from trainctl.tuning.recipes import write_plan_recipe

        result = self._result
        folder = _folder(result._config_dir)
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
    folder = _folder(model)
    return check_deepspeed_file(Path(file), described, world_size=world_size, model=folder)


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
    return examine(compose_target(target, rest, _folder(config_dir)))


def list_recipes(config_dir: Place | None = None) -> list[dict[str, Any]]:
    """Return each recipe with its hardware and whether this machine can launch it.

    `fits_here` is None if that is too close to tell; `reason` says why it is not True.
    """
    from trainctl.launchers.machine_report import recipe_verdicts

    return recipe_verdicts(_folder(config_dir))


# Runs


EventCallback = Callable[[Mapping[str, Any]], None]
"""Called with each record of a run: a step, an evaluation, a save, a failure (docs/records.md)."""


def launch(
    plan: Plan | str,
    *overrides: str,
    run_dir: Place | None = None,
    wait: bool = True,
    force: bool = False,
    on_event: EventCallback | None = None,
) -> Run:
    """Start a plan under supervision; ranks are processes of their own, in a notebook too.

    Args:
        plan: A plan, or a recipe or first override, then planned with `overrides` and files.
        run_dir: Directory of the run; None makes one under `runs/`.
        wait: Return when the run has ended; otherwise at once, and a launcher in the background
            supervises.
        force: Start although the budget does not fit.
        on_event: Called with each record while this function waits.

    Raises:
        TrainctlError: The plan is refused, or the machines are not what it needs. A run that fails
            later does not raise: see `Run.status`.
    """
    raise NotImplementedError


def resume(
    run: Run | Place,
    *overrides: str,
    step: int | None = None,
    from_start: bool = False,
    config_dir: Place | None = None,
    wait: bool = True,
    force: bool = False,
    on_event: EventCallback | None = None,
) -> Run:
    """Continue a run as a new attempt, from its newest complete checkpoint.

    Args:
        run: A run, or its directory.
        overrides: Changes of its configuration.
        step: Continue from the checkpoint after so many steps, and leave later ones behind.
        from_start: Begin again, and leave all checkpoints behind.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.
        wait: As of `launch`; so are `force` and `on_event`.

    Raises:
        TrainctlError: The folder is no run, is in use, or has no checkpoint; or the plan is
            refused.
    """
    raise NotImplementedError


def load(
    source: Run | Checkpoint | Place,
    *,
    step: int | None = None,
    best: bool = False,
    weights: str = "raw",
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[Any, Any]:
    """Return the model of a checkpoint, of transformers, and its tokenizer. Imports torch.

    Args:
        source: A run (then its newest checkpoint) or a checkpoint.
        step: The run's checkpoint after so many steps.
        best: The run's checkpoint with the lowest held-out loss.
        weights: `raw`, or `ema` for the moving average.
        dtype: Number format of the weights, such as `bf16`; None is the model's own.
        device: Device to load onto, as torch names it.

    Raises:
        TrainctlError: There is no such checkpoint, or it is damaged.
    """
    raise NotImplementedError


def list_runs(folder: Place = "runs") -> list[Run]:
    """Return the runs in a folder, the newest last."""
    raise NotImplementedError


class Run:
    """A run directory: a run that was launched here or elsewhere, live or ended."""

    def __init__(self, path: Place) -> None:
        """Open a run.

        Raises:
            TrainctlError: The folder is no run.
        """
        raise NotImplementedError

    @property
    def path(self) -> Path:
        raise NotImplementedError

    @property
    def status(self) -> str:
        """State of the newest attempt: `queued`, `starting`, `running`, `finished`, `failed` or
        `stopped`.
        """
        raise NotImplementedError

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Complete checkpoints, the newest last."""
        raise NotImplementedError

    def metrics(self) -> pandas.DataFrame:
        """Return the metrics of all steps, one row a step."""
        raise NotImplementedError

    def events(self, *kinds: str) -> Iterator[Mapping[str, Any]]:
        """Yield the records of these kinds (all, if none is named), the oldest first."""
        raise NotImplementedError

    def follow(self) -> Iterator[Mapping[str, Any]]:
        """Yield records as they are written, until the run has ended."""
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run has ended, at most `timeout` seconds.

        Raises:
            TimeoutError: It has not ended by then.
        """
        raise NotImplementedError

    def stop(self, *, now: bool = False) -> None:
        """End the run after a checkpoint, or with `now` without one, and wait for that."""
        raise NotImplementedError


class Checkpoint:
    """A complete checkpoint of a run."""

    @property
    def path(self) -> Path:
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Optimizer steps that were done when it was saved."""
        raise NotImplementedError

    def export(self, folder: Place, *, dtype: str | None = None, weights: str = "raw") -> Path:
        """Write a directory that transformers loads.

        Args:
            folder: New directory.
            dtype: Number format of the weights, such as `bf16`; None keeps that of the run.
            weights: `raw`, or `ema` for the moving average.

        Raises:
            TrainctlError: The checkpoint is damaged, or the folder is there already.
        """
        raise NotImplementedError
