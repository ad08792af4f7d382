"""Entry point of a rank: `python -m trainctl.train RUN_DIR --attempt N`, started by the agent.

With `--fork` the process is the fork server of a node's ranks, and each fork goes on as a rank. The
server computes nothing, joins no process group and starts no thread of its own, so a fork inherits
only what imports leave behind. `trainctl.launchers.agent.ranks` starts it.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.engines.flight_recorder import answer_requests, write_failed_record
from trainctl.runs.command import FORK_FLAG, begin_rank, ignore_scheduler_sigterm
from trainctl.runs.held_folder import HeldFolder
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import die_with_parent, gc_disabled
from trainctl.runs.status import Heartbeat

if TYPE_CHECKING:
    from trainctl.plans.types import RunPlan

_POLL_SECONDS = 0.001


def main() -> int:
    """Train as the attempt's plan says; return the exit code."""
    die_with_parent()
    trained: list[bool] = []
    atexit.register(_exit_at_once, trained)  # registered first, so called last
    parser = argparse.ArgumentParser(prog="trainctl.train")
    parser.add_argument("run", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument(FORK_FLAG, action="store_true", dest="is_forked")
    arguments = parser.parse_args()
    run = RunPaths(arguments.run.resolve())
    if arguments.is_forked:
        ignore_scheduler_sigterm()
        become_ranks(_read_plan(run, arguments.attempt))
    attempt, rank = run.attempt(arguments.attempt), int(os.environ["RANK"])
    # Before the first beat: the agent sends SIGUSR1 to a silent rank to get its stacks.
    answer_requests(attempt.flight_record(rank), attempt.flight_request)
    heartbeat = Heartbeat(attempt.heartbeat(rank), HeldFolder(run).require)
    # Slow imports start here: a rank whose agent is gone has exited before them.
    from trainctl.errors import TrainctlError

    plan = _read_plan(run, arguments.attempt)
    try:
        if plan.config.trainer is not None:
            from trainctl.data.user_functions import make_importable, run_trainer

            make_importable(Path.cwd())
            return run_trainer(plan, run, attempt)
        with gc_disabled():
            from trainctl.train.loop import train_rank
        if plan.config.model.factory is not None:
            from trainctl.data.user_functions import make_importable

            make_importable(Path.cwd())
        train_rank(plan, run, arguments.attempt, heartbeat)
        trained.append(True)
    except TrainctlError as error:
        print(f"error: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"hint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    except Exception as error:
        write_failed_record(attempt.flight_record(rank), error)
        raise
    return 0


def become_ranks(plan: RunPlan) -> None:
    """Import what the plan's ranks need, wait for the agent's order, fork. Returns in each rank.

    The fork server itself exits here. When this returns, the rank's environment variables are set
    and its parent is the agent.
    """
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep what imports print out of the answer
    _import_for_ranks(plan)
    order = b""
    while not order.endswith(b"\n"):
        part = os.read(sys.stdin.fileno(), 1 << 16)
        if not part:  # the agent has gone
            os._exit(1)
        order += part
    here = os.getpid()
    pids = []
    for variables in json.loads(order):
        with warnings.catch_warnings():
            # Python warns of forks with threads running; numpy's threads stop for a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            os.close(answer)
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            os.setsid()
            os.environ.update(variables)
            # Wait until the agent is the parent: `begin_rank` ties this process to it.
            while os.getppid() == here:
                time.sleep(_POLL_SECONDS)
            begin_rank()
            return
        pids.append(pid)
    os.write(answer, json.dumps(pids).encode() + b"\n")
    os._exit(0)


def _import_for_ranks(plan: RunPlan) -> None:
    """Import what a rank imports before its first step; errors are left for the rank to report."""
    from trainctl.errors import TrainctlError

    with suppress(TrainctlError), gc_disabled():
        import trainctl.train.loop  # noqa: F401
        from trainctl.engines import patch_checks
        from trainctl.engines.protocol import engine_backend

        engine_backend(plan)
        patch_checks.require_original_definitions(plan.config)


def _read_plan(run: RunPaths, attempt: int) -> RunPlan:
    """Read the attempt's plan, and set the environment variables that libraries read at import."""
    from trainctl.runs.directory import read_plan

    plan = read_plan(run.attempt(attempt).plan)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["DS_ACCELERATOR"] = "cpu" if plan.hardware.accelerator.value == "cpu" else "cuda"
    return plan


def _exit_at_once(trained: list[bool]) -> None:
    """Exit at once after a training that succeeded, without unloading the libraries.

    Everything is saved and closed by then. Unloading takes half a second, and an error in it would
    be taken for a failure of the training.
    """
    if trained:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
