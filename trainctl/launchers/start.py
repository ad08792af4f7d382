"""Start of a launch or a resume: checks, the run directory, the attempt, and its end.

An `Observer` is told of each phase. The command line shows them; the API raises what went wrong.
"""

from __future__ import annotations

import signal
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.compose import ComposedConfig
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, RunFailed, Severity, TrainctlError
from trainctl.launchers.attempts import require_space
from trainctl.launchers.interface import LaunchRequest, Outcome, has_scheduler, launch_function
from trainctl.launchers.planning import (
    PlannedConfig,
    checkpoint_bytes,
    machine_findings,
    plan_config,
)
from trainctl.launchers.processes import Process, settle_run, start_in_background
from trainctl.launchers.resume import (
    PlannedResume,
    check_same_model,
    compare_with_checkpoint,
    plan_resume,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import effective_attempt, ignored_config_findings
from trainctl.runs.checkpoints import archive_later_checkpoints
from trainctl.runs.completion import why_done
from trainctl.runs.directory import (
    DEFAULT_ROOT,
    create_run,
    is_run,
    last_attempt,
    new_attempt,
    open_run,
    run_id,
)
from trainctl.runs.failures import first_failure
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.listing import summarise_run
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import EventFollower, OnEvent, ignore_progress, read_events
from trainctl.runs.status import State

_POLL_SECONDS = 0.1


class Observer:
    """Receiver of the phases of a launch or a resume, in the order of its methods.

    An exception that a method raises ends the launch. Up to `accepted` nothing has been made.

    Args:
        progress: Called with each record of the launch; None ignores them.
    """

    def __init__(self, progress: OnEvent | None = None) -> None:
        self._progress = progress

    def warn(self, text: str) -> None:
        """Take a warning that concerns no key."""
        warnings.warn(text, stacklevel=2)

    def proving(self, text: str) -> None:
        """Take what the proof before a resume does or has found."""

    def found(self, findings: Sequence[Finding]) -> None:
        """Take warnings on ignored configuration, then of the plan, then on the machines."""
        for each in findings:
            self.warn(str(each))

    def changes(self, run: RunPaths, resume: PlannedResume) -> None:
        """Take what a resume changes in the configuration."""

    def nothing_to_do(self, why: str, hint: str) -> None:
        """Take why a resume ends here: no step is left."""

    def planned(self, planned: PlannedConfig) -> None:
        """Take the plan, which may still be refused for its memory or for what is not built yet."""
        self.found([each for each in planned.findings if not each.is_error])

    def accepted(
        self,
        planned: PlannedConfig,
        plan: RunPlan,
        run: RunPaths | None,
        resume: PlannedResume | None,
    ) -> None:
        """Take the accepted plan, before the machines are checked; `run` and `resume` if there."""

    def left_behind(self, path: Path) -> None:
        """Take a checkpoint that no longer counts."""

    def made(self, run: RunPaths) -> None:
        """Take the run whose next attempt has been made."""

    def records(
        self, run: RunPaths, attempt: AttemptPaths, plan: RunPlan
    ) -> AbstractContextManager[OnEvent]:
        """Return the receiver of the records, entered while the launch runs."""
        return nullcontext(self._progress or ignore_progress)

    def detached(self, run: RunPaths, process: Process) -> None:
        """Take the launcher that runs in the background, if the launch is not waited for."""

    def ended(self, run: RunPaths, plan: RunPlan, outcome: Outcome) -> None:
        """Take how the launch ended."""


def start_run(
    composed: ComposedConfig,
    *,
    run_dir: Path | None,
    resume: bool,
    argv: Sequence[str],
    force: bool,
    wait: bool,
    began: float,
    observer: Observer,
) -> RunPaths:
    """Plan a configuration, make its run, and start the first attempt.

    Args:
        run_dir: The directory; None makes one under `runs/`.
        resume: Resume the run in `run_dir`, if there is one: a scheduler repeats its whole command.
        argv: Command line for the run's record.
        force: Start although the budget does not fit.
        wait: Return when the launch has ended, or a scheduler has it; otherwise at once.
        began: Unix time from which the launch's time limit counts.

    Raises:
        TrainctlError: The plan is refused, the machines are not what it needs, or the directory
            holds a run. As `RunFailed`: the run failed.
        KeyboardInterrupt: The run saved and ended because of Ctrl-C.
    """
    if resume and run_dir is not None and is_run(run_dir):
        run = open_run(run_dir)
        resume_run(run, lambda _: composed, force=force, wait=wait, began=began, observer=observer)
        return run
    planned = plan_config(composed, with_files=True, tokenize=True)
    plan = _accepted_plan(planned, observer, force=force)
    observer.accepted(planned, plan, None, None)
    check_machine(planned, plan, run_dir or DEFAULT_ROOT, observer)
    _check_mirror(plan, None)
    run = create_run(plan.config, run_dir=run_dir, argv=argv)
    _run_attempt(run, planned, plan, observer, wait=wait, began=began)
    return run


def resume_run(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    step: int | None = None,
    attempt: int | None = None,
    from_start: bool = False,
    force: bool,
    wait: bool,
    began: float,
    observer: Observer,
) -> None:
    """Continue a run as a new attempt, from its newest complete checkpoint or an earlier one.

    Later checkpoints than that of `step`, or with `from_start` all of them, are left behind.

    Args:
        configure: Makes the attempt's configuration from the run's.

    Raises:
        TrainctlError: The run is in use or has no checkpoint, or the plan is refused. As
            `RunFailed`: the run failed.
        KeyboardInterrupt: The run saved and ended because of Ctrl-C.
    """
    if from_start and step is not None:
        raise TrainctlError("--step and --from-start name two places", hint="leave one of them out")
    with hold_lock(run):
        standing = effective_attempt(run) if attempt is None else None
        observer.found(ignored_config_findings(run, standing))
        resume = plan_resume(
            run, configure, step=step, attempt=attempt, from_start=from_start, warn=observer.warn
        )
        observer.changes(run, resume)
        checkpoint, planned = resume.checkpoint, resume.planned
        if checkpoint is not None and planned.assessment.plan is not None:
            check_same_model(planned.composed.config, checkpoint.path, observer.warn)
            done = why_done(run, checkpoint, planned.assessment.plan)
            if done is not None:
                settle_run(run)
                observer.nothing_to_do(*done)
                return
            compare_with_checkpoint(run, checkpoint, planned.assessment.plan, observer.warn)
        plan = _accepted_plan(planned, observer, force=force)
        observer.accepted(planned, plan, run, resume)
        check_machine(planned, plan, run.root, observer)
        _check_mirror(plan, run)
        if from_start or (checkpoint is not None and step is not None):
            for path in archive_later_checkpoints(run, step or 0, attempt=last_attempt(run) + 1):
                observer.left_behind(path)
        _run_attempt(run, planned, plan, observer, wait=wait, began=began)


def _accepted_plan(planned: PlannedConfig, observer: Observer, *, force: bool) -> RunPlan:
    """Return the plan.

    Raises:
        TrainctlError: The plan has errors, does not fit (unless `force`), or cannot be trained yet.
    """
    plan = planned.assessment.plan
    if plan is None or planned.assessment.budget is None or planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    observer.planned(planned)
    if planned.errors and not force:
        raise _with_notes(
            TrainctlError(
                "the memory budget does not fit",
                hint="--force starts anyway",
                exit_code=ExitCode.does_not_fit,
            ),
            [error.message for error in planned.errors],
        )
    if plan.not_yet:
        message = "this plan can be checked and budgeted, but not trained with yet"
        raise _with_notes(TrainctlError(message), plan.not_yet)
    return plan


def _with_notes(error: TrainctlError, notes: Sequence[str]) -> TrainctlError:
    """Return the error with notes for a traceback; a command has shown them by then."""
    for note in notes:
        error.add_note(note)
    return error


def check_machine(
    planned: PlannedConfig,
    plan: RunPlan,
    folder: Path,
    observer: Observer,
    *,
    is_dry_run: bool = False,
) -> None:
    """Refuse to start if the machines are not what the plan needs, or the run cannot be stored.

    In a dry run, what this machine lacks (exit code 4) is a warning: another one may start the run.

    Raises:
        TrainctlError: With all findings on the machines.
    """
    findings = machine_findings(planned, plan, folder)
    if is_dry_run:
        findings = [_as_warning_of_machine(finding) for finding in findings]
    if any(finding.is_error for finding in findings):
        raise TrainctlError.from_findings(findings)
    observer.found(findings)


def _as_warning_of_machine(finding: Finding) -> Finding:
    if finding.exit_code is not ExitCode.environment:
        return finding
    return replace(finding, severity=Severity.warning)


def _check_mirror(plan: RunPlan, run: RunPaths | None) -> None:
    """Refuse to start with the mirror of another run.

    Raises:
        TrainctlError: It is another's.
    """
    url = plan.config.checkpoint.mirror
    if url is not None and plan.config.trains_itself:
        from trainctl.mirror.fetch import owner_finding

        finding = owner_finding(url, None if run is None else run_id(run))
        if finding is not None:
            raise TrainctlError.from_findings([finding])


def _run_attempt(
    run: RunPaths,
    planned: PlannedConfig,
    plan: RunPlan,
    observer: Observer,
    *,
    wait: bool,
    began: float,
) -> None:
    """Start the next attempt and, with `wait`, see it to its end.

    Raises:
        TrainctlError: As `RunFailed`: it failed.
        KeyboardInterrupt: It saved and ended because of Ctrl-C.
    """
    needed_bytes = checkpoint_bytes(planned)
    with hold_lock(run) as lock:
        attempt = new_attempt(run, plan)
        observer.made(run)
        is_here = threading.current_thread() is threading.main_thread()
        if not has_scheduler(plan.config) and not (wait and is_here):
            require_space(run.root, needed_bytes)
            follower = EventFollower(run.events)
            process = start_in_background(run, attempt, lock, dies_with_parent=wait)
            if not wait:
                # Reaps the launcher at its end, in a process that lives longer.
                threading.Thread(target=process.wait, daemon=True).start()
                observer.detached(run, process)
                return
            with observer.records(run, attempt, plan) as progress:
                outcome = _follow(run, process, follower, progress)
        else:
            with observer.records(run, attempt, plan) as progress:
                outcome = launch_function(plan)(
                    LaunchRequest(
                        run=run,
                        attempt=attempt,
                        plan=plan,
                        on_event=progress,
                        checkpoint_bytes=needed_bytes,
                        began=began,
                    )
                )
    observer.ended(run, plan, outcome)
    if outcome.exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(outcome.message)
    if outcome.exit_code not in (ExitCode.success, ExitCode.requeue):
        raise RunFailed(
            outcome.message or f"{run.root} ended with exit code {outcome.exit_code}",
            hint=outcome.hint,
            exit_code=ExitCode.of(outcome.exit_code),
            path=run.root,
            cause=outcome.cause,
            log=outcome.log,
            log_tail=outcome.log_tail,
        )


def _follow(run: RunPaths, process: Process, follower: EventFollower, progress: OnEvent) -> Outcome:
    """Pass on the records of a launcher in the background until it ends; return how it ended.

    Signal handlers belong to the main thread, so any other thread leaves the launch to a process.
    """
    try:
        while True:
            code = process.poll()
            for event in follower.poll():
                progress(event)
            if code is not None:
                break
            time.sleep(_POLL_SECONDS)
    except BaseException:  # of `progress`: the launch ends with it, as it does in the main thread
        process.terminate()
        process.wait()
        raise
    return outcome_of(run, code)


def outcome_of(run: RunPaths, code: int | None = None) -> Outcome:
    """Return how the newest attempt of a run ended, from its records.

    Args:
        code: Exit code of its launcher, if this process started it.
    """
    summary = summarise_run(run)
    failure: Mapping[str, Any] = {}
    if summary.state == State.failed:
        failure = first_failure(read_events(run.events, "failure"), summary.attempt) or {}
    if summary.exit_code is not None:
        code = summary.exit_code
    is_final = summary.state in (State.finished, State.stopped)
    return Outcome(
        exit_code=code if code is not None else ExitCode.run_state,
        state=State(summary.state) if is_final else State.failed,
        message=summary.message or ("" if is_final else f"the launcher of {run.root} is gone"),
        cause=failure.get("cause", ""),
        hint=failure.get("hint", ""),
        log=Path(failure["log"]) if failure else None,
        log_tail=tuple(failure.get("log_tail", ())),
    )
