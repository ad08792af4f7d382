"""`python -m trainctl.launchers RUN_DIR [--attempt N]`: the launcher of a run without a terminal.

It runs in the background or in a scheduler's job. A job that was requeued runs the same command
again; the records in the run directory then tell it to make a new attempt.
"""

from __future__ import annotations

import argparse
import signal
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from trainctl.errors import TrainctlError
from trainctl.launchers.attempts import is_done, next_attempt
from trainctl.launchers.interface import LaunchRequest, after_job, launch_function
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import ResumePoint
from trainctl.runs.lock import find_holder, hold_lock, inherit_lock
from trainctl.runs.processes import die_with_parent, wait_while
from trainctl.runs.status import State, change_status, read_status

_PATIENCE_SECONDS = 60.0
"""Longest wait for the run's lock: the submitting process, or the last launcher of a requeued job,
may still hold it.
"""


def main() -> int:
    """Run the attempt, or a new one, to its end, and return the launch's exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.launchers")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, help="else the newest")
    parser.add_argument("--lock", type=int, help="descriptor of the run's lock, held already")
    given = parser.parse_args()
    die_with_parent(death_signal=signal.SIGTERM)  # only if `PARENT_VARIABLE` is set
    try:
        run = open_run(given.run_dir)
        with _hold_lock(run, given.lock):
            code, plan = _run_attempt(run, given.attempt)
        after_job(run, plan, code)
    except TrainctlError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    return code


def _run_attempt(run: RunPaths, number: int | None) -> tuple[int, RunPlan]:
    attempt, plan = next_attempt(run, number)
    is_replay = run.recording.is_dir()  # which may only look at the step after its checkpoint
    if is_done(run, plan) and not is_replay:
        print(f"nothing to do: {run.root} is at step {plan.stop_step}, where this launch ends")
        _write_final_status(run, State.finished, 0, "")
        return 0, plan
    try:
        launch = LaunchRequest(run=run, attempt=attempt, plan=plan, on_event=lambda _: None)
        outcome = launch_function(plan)(launch)
    except TrainctlError as error:
        _write_final_status(run, State.failed, int(error.exit_code), error.message)
        raise
    for line in outcome.log_tail:
        print(f"  {line}")
    if outcome.message:
        print(outcome.message, flush=True)
    if plan.config.trains_itself and outcome.state in (State.failed, State.stopped):
        print(ResumePoint.of(run).sentence(run), flush=True)
    return outcome.exit_code, plan


def _hold_lock(run: RunPaths, descriptor: int | None) -> AbstractContextManager[int]:
    if descriptor is not None:
        return inherit_lock(run, descriptor)
    who = find_holder(run)
    if who is not None:
        print(
            f"waiting for process {who.pid} on {who.host}, which holds {run.root}, for "
            f"{_PATIENCE_SECONDS:.0f} s at most",
            flush=True,
        )
    wait_while(lambda: find_holder(run) is not None, _PATIENCE_SECONDS)
    return hold_lock(run)


def _write_final_status(run: RunPaths, state: State, code: int, message: str) -> None:
    """Write the final status where no attempt was supervised to its end."""
    status = read_status(run)
    if status is not None and not status.state.is_final:
        change_status(run, state, code, message)


if __name__ == "__main__":
    sys.exit(main())
