"""The Python API: what the commands do, as functions that return objects.

Nothing here prints or exits. A user's mistake is a `TrainctlError` with `findings`. Everything is
imported in the function that needs it: `import trainctl.api` loads no other room but `errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.errors import Finding, TrainctlError

if TYPE_CHECKING:
    import pandas

    from trainctl.launchers.planning import PlannedConfig

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


def plan(
    *overrides: str,
    hardware: str | None = None,
    config_dir: Place | None = None,
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
        files: Also check the files that the configuration names, as before a launch.
        exact: Trace the model for its budget, in a process of its own; takes some seconds.
        calibrated: Use measurements of this machine, if it is the hardware.

    Returns:
        The plan. One that does not fit is returned too: `fits` is then False, and the error is
        among `findings`.

    Raises:
        TrainctlError: The configuration is not legal; `findings` has every problem.
    """
    from trainctl.launchers import planning

    if hardware is not None:
        overrides = (*overrides, f"hardware={hardware}")
    target, rest = _split_target(overrides)
    folder = None if config_dir is None else Path(config_dir)
    composed = planning.compose_target(target, rest, folder)
    planned = planning.plan_config(composed, with_files=files, exact=exact, calibrated=calibrated)
    if planned.assessment.plan is None or planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    request = _Request(overrides, folder, files=files, exact=exact, calibrated=calibrated)
    return Plan(planned, request)


def _split_target(overrides: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Split a leading recipe or run directory from the overrides after it.

    An override always has a `=` or starts with `~`, so anything else in front is a target.
    """
    if overrides and "=" not in overrides[0] and not overrides[0].startswith("~"):
        return overrides[0], overrides[1:]
    return None, overrides


@dataclass(frozen=True, slots=True)
class _Request:
    """Arguments of the call of `plan` that made a plan."""

    overrides: tuple[str, ...]
    config_dir: Path | None
    files: bool
    exact: bool
    calibrated: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Plan:
    """A checked configuration with its memory budget; made by `plan`, never changed."""

    details: PlannedConfig
    """Composed configuration, hardware, frozen plan and budget, as the commands use them. Not part
    of the public API: it may change in any release.
    """
    _request: _Request

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
        """The JSON that DeepSpeed gets; empty under another engine."""
        raise NotImplementedError

    @property
    def config(self) -> dict[str, Any]:
        """The composed configuration as plain data."""
        raise NotImplementedError

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that the configuration was composed with."""
        return self.details.composed.overrides

    @property
    def memory(self) -> Any:
        """The memory budget, in bytes."""
        raise NotImplementedError

    def commands(self) -> list[list[str]]:
        """Return the command that starts each node, as arguments."""
        raise NotImplementedError

    def suggestions(self) -> Any:
        """Return changes with which the plan fits, or which use its free memory for speed."""
        raise NotImplementedError

    def with_(self, *overrides: str) -> Plan:
        """Return the plan of the same configuration with more overrides.

        Raises:
            TrainctlError: The configuration is not legal.
        """
        raise NotImplementedError

    def diff(self, other: Plan) -> Any:
        """Return the keys whose values differ in effect, with those of this plan and `other`."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return plan, budget and findings as plain data."""
        raise NotImplementedError


def search(
    *overrides: str,
    hardware: str | None = None,
    top: int = 5,
    config_dir: Place | None = None,
) -> SearchResult:
    """Search the fastest layouts, batches and recomputation that are legal and fit.

    Args:
        overrides: As of `plan`. A first word without `=` is a recipe, else a model. Groups and keys
            that are given stay as they are.
        hardware: Machines, such as `8xh100-80g`.
        top: Number of plans, each with another layout.
        config_dir: A folder of yours with `conf/` and `recipes/`, searched first.

    Raises:
        TrainctlError: The configuration is not legal, or no plan fits.
    """
    raise NotImplementedError


class SearchResult(Sequence[Any]):
    """Plans that a search found, the fastest first."""


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
