"""Sweeps: every run is planned and checked before the first one starts, and again on a resume."""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from trainctl.config.compose import ComposedConfig, recompose
from trainctl.config.overrides import SweepPoint, expand_sweep
from trainctl.config.registry import function_of, register_options
from trainctl.config.secrets import REDACTED
from trainctl.errors import Finding, RunStateError, TrainctlError
from trainctl.launchers.interface import check
from trainctl.launchers.planning import compose_config
from trainctl.launchers.planning import plan_config as make_plan
from trainctl.launchers.processes import Process, settle_run, start_in_background
from trainctl.launchers.rank_command import user_code_folder
from trainctl.launchers.resume import require_nothing_saved
from trainctl.options.launcher import spec_of
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.directory import create_run, last_attempt, new_attempt
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.sweeps import (
    RemainingRun,
    Sweep,
    SweepAction,
    new_sweep,
    read_sweep,
    remaining_runs,
)

Started = list[tuple[RunPaths, AttemptPaths]]
"""Runs with the attempts that were made for them."""


class SweepObserver:
    """Receiver of the phases of a sweep, in the order of its methods.

    An exception that a method raises ends the sweep. Up to `planned` nothing has been made.
    """

    def remaining(self, runs: Sequence[RemainingRun]) -> None:
        """Take what a resume does with each run of the sweep."""

    def found(self, findings: Sequence[Finding]) -> None:
        """Take the warnings of all runs, each once; by default Python's `warnings` have them."""
        for each in findings:
            warnings.warn(str(each), stacklevel=2)

    def planned(self, points: Sequence[SweepPoint]) -> None:
        """Take the combinations of values, all accepted; none of a resume."""

    def nothing_to_do(self) -> None:
        """Take that a resume ends here: no run is left to start."""

    def made(self, folder: Path) -> None:
        """Take the folder of a new sweep, in which all runs are."""

    def submitted(self, folder: Path, job: str, count: int) -> None:
        """Take the scheduler's id of the array, and the number of its runs."""

    def queued(self) -> None:
        """Take that the runs are started here, one after another."""

    def ended(self, run: RunPaths, code: int, count: int) -> None:
        """Take a run that ended, its exit code, and the number of runs that were started."""


def start_sweep(
    overrides: Sequence[str],
    *,
    sweep_dir: Path | None,
    parallel: int | None,
    force: bool,
    config_dir: Path | None,
    argv: Sequence[str],
    observer: SweepObserver,
) -> Path:
    """Plan the run of every combination of values, make them, and run them; return the folder.

    Args:
        parallel: Runs at a time; None is one here, and all in a scheduler's array.

    Raises:
        TrainctlError: A plan is refused, or the runs cannot be queued together.
        QueueStopped: A signal ended the queue.
    """
    points = expand_sweep(overrides)
    plans, found = _unzipped(
        _plan_of_point(
            partial(compose_config, point.overrides, config_dir), point.values, force=force
        )
        for point in points
    )
    _check_queue(plans)
    _check_mirrors(plans)
    observer.found(found)
    observer.planned(points)
    folder = new_sweep(sweep_dir, overrides, points, config_dir)
    started = []
    for index, plan in enumerate(plans):
        run = create_run(plan.config, run_dir=folder / str(index), argv=argv)
        started.append((run, new_attempt(run, plan)))
    observer.made(folder)
    _run(folder, plans[0], started, parallel, observer)
    return folder


def resume_sweep(
    folder: Path, *, parallel: int | None, force: bool, argv: Sequence[str], observer: SweepObserver
) -> None:
    """Start the runs of a sweep that were never started, resume interrupted ones, leave the rest.

    Raises:
        TrainctlError: The sweep is still running, or a run's plan is refused now.
        QueueStopped: A signal ended the queue.
    """
    record = read_sweep(folder)
    if record.config_dir is not None:
        register_options(Path(record.config_dir), is_trusted=False)
    with hold_lock(RunPaths(folder)):
        left = remaining_runs(folder)
        if [item for item in left if settle_run(item.run)]:
            left = remaining_runs(folder)
        observer.remaining(left)
        waiting = [item for item in left if item.next is not SweepAction.leave]
        plans, found = _unzipped(_plan_again(item, record, force=force) for item in waiting)
        observer.found(found)
        observer.planned(())
        if not waiting:
            observer.nothing_to_do()
            return
        _check_queue(plans)
        pairs = zip(waiting, plans, strict=True)
        started = [_attempt_again(item, plan, argv) for item, plan in pairs]
        _run(folder, plans[0], started, parallel, observer)


def _run(
    folder: Path, plan: RunPlan, started: Started, parallel: int | None, observer: SweepObserver
) -> None:
    """Run the attempts that were made, here or as one array of the launcher's scheduler."""
    if spec_of(plan.config.launcher).submit_sweep:
        submit = function_of("launcher", plan.config.launcher.kind, "submit_sweep")
        job = str(submit(folder, plan, started, parallel))
        observer.submitted(folder, job, len(started))
        return

    def on_end(run: RunPaths, code: int) -> None:
        observer.ended(run, code, len(started))

    with hold_lock(RunPaths(folder)):  # so that nobody resumes a sweep that is still running
        observer.queued()
        run_queue(started, parallel=parallel or 1, on_end=on_end)


def _unzipped(
    planned: Iterable[tuple[RunPlan, list[Finding]]],
) -> tuple[list[RunPlan], list[Finding]]:
    """Return the plans, and their warnings without repetitions."""
    plans: list[RunPlan] = []
    found: dict[Finding, None] = {}
    for plan, warned in planned:
        plans.append(plan)
        found |= dict.fromkeys(warned)
    return plans, list(found)


def _plan_again(item: RemainingRun, record: Sweep, *, force: bool) -> tuple[RunPlan, list[Finding]]:
    """Plan the rest of a run, from its own directory if it exists."""
    values = record.points[item.index]
    if item.next is SweepAction.make:
        overrides = _recorded_overrides(item, record)
        own = None if record.config_dir is None else Path(record.config_dir)
        return _plan_of_point(lambda: compose_config(overrides, own), values, force=force)
    config = config_of(item.run)
    resumes = config.trains_itself and newest_checkpoint(item.run)[0] is not None
    if config.trains_itself and not resumes:
        require_nothing_saved(item.run)
    folder = user_code_folder(config, item.run)
    return _plan_of_point(
        lambda: recompose(config, ()), values, force=force, folder=folder, resumes=resumes
    )


def _recorded_overrides(item: RemainingRun, record: Sweep) -> tuple[str, ...]:
    """Return the recorded overrides of a run whose directory does not exist.

    Raises:
        TrainctlError: The overrides were not recorded, or have a redacted secret (exit code 5).
    """
    overrides = record.runs[item.index] if item.index < len(record.runs) else ()
    if overrides and not any(REDACTED in text for text in overrides):
        return overrides
    raise RunStateError(
        f"run {item.index} is not there, and what it was to be is not recorded in full",
        hint=f"trainctl launch ... --run-dir {item.run.root} makes it",
    )


def _attempt_again(
    item: RemainingRun, plan: RunPlan, argv: Sequence[str]
) -> tuple[RunPaths, AttemptPaths]:
    run = item.run
    if item.next is SweepAction.make:
        run = create_run(plan.config, run_dir=run.root, argv=argv)
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
    resumes: bool = False,
) -> tuple[RunPlan, list[Finding]]:
    """Return the plan of a run and its warnings; errors name the run's values.

    Raises:
        TrainctlError: The plan is refused.
    """
    try:
        planned = make_plan(
            composing(), with_files=True, resumes=resumes, folder=folder, tokenize=True
        )
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
    return made, [each for each in (*planned.findings, *found) if not each.is_error]


def _check_mirrors(plans: Sequence[RunPlan]) -> None:
    """Refuse runs that share a mirror, which has the checkpoints of one run.

    Raises:
        TrainctlError: Two runs have the same.
    """
    mirrors = [plan.config.checkpoint.mirror for plan in plans]
    shared = next((url for url in mirrors if url is not None and mirrors.count(url) > 1), None)
    if shared is not None:
        raise TrainctlError(
            f"checkpoint.mirror={shared} is the mirror of one run, and the sweep has several",
            hint="leave it out; a run that is to be kept can be given one on a resume",
        )


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


class QueueStopped(KeyboardInterrupt):
    """A signal, whose number is `number`, ended the queue and its running launches."""

    def __init__(self, number: int) -> None:
        super().__init__(f"the sweep was stopped by {signal.Signals(number).name}")
        self.number = number


def run_queue(
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    *,
    parallel: int,
    on_end: Callable[[RunPaths, int], None],
) -> None:
    """Run the attempts, each by its own launcher, and wait for all.

    A failure does not keep the others from running. In the main thread, SIGINT and SIGTERM are
    passed to the running launchers, and the rest is not started.

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

    is_main = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, stop) for number in signals}
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
    except BaseException:  # of `on_end`, or of a launcher that does not start: all end with it
        for _run, process in running:
            process.terminate()
        for _run, process in running:
            process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        raise QueueStopped(received[0])
