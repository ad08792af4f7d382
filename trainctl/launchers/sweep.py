"""Sweeps: every run is planned and checked before the first one starts, and again on a resume."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from trainctl.config.compose import ComposedConfig, recompose
from trainctl.config.overrides import SweepPoint
from trainctl.config.registry import function_of
from trainctl.config.secrets import REDACTED
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.interface import check
from trainctl.launchers.planning import compose_config
from trainctl.launchers.planning import plan_config as make_plan
from trainctl.launchers.processes import Process, start_in_background
from trainctl.launchers.rank_command import user_code_folder
from trainctl.launchers.resume import require_nothing_saved
from trainctl.options.launcher import spec_of
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.directory import create_run, last_attempt, new_attempt
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.sweeps import RemainingRun, Sweep, SweepAction, new_sweep

Started = list[tuple[RunPaths, AttemptPaths]]
"""Runs with the attempts that were made for them."""


def plan_sweep(
    points: Sequence[SweepPoint], config_dir: Path | None, *, force: bool
) -> list[RunPlan]:
    """Plan the run of every combination of values.

    Raises:
        TrainctlError: A plan is refused, or the runs cannot be queued together.
    """
    plans = [
        _plan_of_point(
            partial(compose_config, point.overrides, config_dir), point.values, force=force
        )
        for point in points
    ]
    _check_queue(plans)
    return plans


def make_sweep(
    sweep_dir: Path | None,
    overrides: Sequence[str],
    points: Sequence[SweepPoint],
    plans: Sequence[RunPlan],
    config_dir: Path | None,
) -> tuple[Path, Started]:
    """Make the sweep's folder, its runs and the first attempt of each."""
    folder = new_sweep(sweep_dir, overrides, points, config_dir)
    started = []
    for index, plan in enumerate(plans):
        run = create_run(plan.config, run_dir=folder / str(index), argv=sys.argv)
        started.append((run, new_attempt(run, plan)))
    return folder, started


def plan_rest(waiting: Sequence[RemainingRun], record: Sweep, *, force: bool) -> list[RunPlan]:
    """Plan the runs of a sweep that were never started or were interrupted.

    Raises:
        TrainctlError: A run's plan is refused now.
    """
    return [_plan_again(item, record, force=force) for item in waiting]


def make_attempts(waiting: Sequence[RemainingRun], plans: Sequence[RunPlan]) -> Started:
    """Make the next attempt of each run that is started or resumed.

    Raises:
        TrainctlError: The runs cannot be queued together.
    """
    _check_queue(plans)
    return [_attempt_again(item, plan) for item, plan in zip(waiting, plans, strict=True)]


def submit_sweep(folder: Path, plan: RunPlan, started: Started, parallel: int | None) -> str | None:
    """Hand the runs to the scheduler as one array; None if the launcher has no scheduler.

    Returns:
        The scheduler's id of the array.
    """
    if not spec_of(plan.config.launcher).submit_sweep:
        return None
    submit = function_of("launcher", plan.config.launcher.kind, "submit_sweep")
    return str(submit(folder, plan, started, parallel))


def _plan_again(item: RemainingRun, record: Sweep, *, force: bool) -> RunPlan:
    """Plan the rest of a run, from its own directory if it exists."""
    values = record.points[item.index]
    if item.next is SweepAction.make:
        overrides = _recorded_overrides(item, record)
        own = None if record.config_dir is None else Path(record.config_dir)
        return _plan_of_point(lambda: compose_config(overrides, own), values, force=force)
    config = config_of(item.run)
    if config.trains_itself and newest_checkpoint(item.run)[0] is None:
        require_nothing_saved(item.run)
    folder = user_code_folder(config, item.run)
    return _plan_of_point(lambda: recompose(config, ()), values, force=force, folder=folder)


def _recorded_overrides(item: RemainingRun, record: Sweep) -> tuple[str, ...]:
    """Return the recorded overrides of a run whose directory does not exist.

    Raises:
        TrainctlError: The overrides were not recorded, or have a redacted secret (exit code 5).
    """
    overrides = record.runs[item.index] if item.index < len(record.runs) else ()
    if overrides and not any(REDACTED in text for text in overrides):
        return overrides
    raise TrainctlError(
        f"run {item.index} is not there, and what it was to be is not recorded in full",
        hint=f"trainctl launch ... --run-dir {item.run.root} makes it",
        exit_code=ExitCode.run_state,
    )


def _attempt_again(item: RemainingRun, plan: RunPlan) -> tuple[RunPaths, AttemptPaths]:
    run = item.run
    if item.next is SweepAction.make:
        run = create_run(plan.config, run_dir=run.root, argv=sys.argv)
    elif item.next is SweepAction.start:
        return run, run.attempt(last_attempt(run))
    with hold_lock(run):
        return run, new_attempt(run, plan)


def _plan_of_point(
    composing: Callable[[], ComposedConfig],
    values: Mapping[str, str],
    *,
    force: bool,
    folder: Path | None = None,
) -> RunPlan:
    """Return the plan of a run; errors name the run's values.

    Raises:
        TrainctlError: The plan is refused.
    """
    try:
        planned = make_plan(composing(), with_files=True, folder=folder, tokenize=True)
        made = planned.assessment.plan
        errors = planned.unforceable_errors if force else planned.errors
        if made is None or errors:
            raise TrainctlError.from_findings(planned.findings)
        if made.not_yet:
            raise TrainctlError(made.not_yet[0])
        found = check(made, Path.cwd(), None)
        if any(finding.is_error for finding in found):
            raise TrainctlError.from_findings(found)
    except TrainctlError as error:
        where = " ".join(f"{key}={value}" for key, value in values.items())
        raise TrainctlError(
            f"{error.message}; the run is {where or 'the only one'}",
            hint=error.hint,
            exit_code=error.exit_code,
            findings=error.findings,
        ) from None
    return made


def _check_queue(plans: Sequence[RunPlan]) -> None:
    """Refuse runs that cannot be queued together.

    Raises:
        TrainctlError: The runs differ in their launcher or, in an array, in their resources; or the
            launcher submits single runs only.
    """
    first = plans[0]
    spec = spec_of(first.config.launcher)
    if spec.queue and not spec.submit_sweep:
        raise TrainctlError(
            f"a sweep has no queue on {spec.name}",
            hint=spec.sweep_hint or "launch the runs one by one",
        )
    for plan in plans:
        if plan.config.launcher.kind != spec.name:
            raise TrainctlError("the runs of a sweep need one launcher")
        same = plan.config.launcher == first.config.launcher and plan.hardware == first.hardware
        if spec.submit_sweep and not same:
            raise TrainctlError(
                f"the tasks of a {spec.queue} array ask for the same nodes, and this sweep varies "
                "them",
                hint="make a sweep for each value of launcher and hardware keys",
            )


_POLL_SECONDS = 0.1


class QueueStopped(Exception):
    """A signal, whose number is `number`, ended the queue and its running launches."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_queue(
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    *,
    parallel: int,
    on_end: Callable[[RunPaths, int], None],
) -> None:
    """Run the attempts, each by its own launcher, and wait for all. Call it in the main thread.

    A failure does not keep the others from running. SIGINT and SIGTERM are passed to the running
    launchers, and the rest is not started.

    Args:
        on_end: Called with each run that ended, and its exit code.

    Raises:
        QueueStopped: A signal came; all launchers have ended.
    """
    waiting = list(attempts)
    running: list[tuple[RunPaths, Process]] = []
    received: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        received.append(number)
        for _run, process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while running or (waiting and not received):
            while waiting and len(running) < parallel and not received:
                run, attempt = waiting.pop(0)
                with hold_lock(run) as lock:
                    running.append(
                        (run, start_in_background(run, attempt, lock, dies_with_parent=True))
                    )
                if received:  # a signal between hold and here
                    running[-1][1].send_signal(received[0])
            for run, process in [item for item in running if item[1].poll() is not None]:
                running.remove((run, process))
                on_end(run, process.returncode)
            time.sleep(_POLL_SECONDS)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise QueueStopped(received[0])
