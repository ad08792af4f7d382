"""`python -m trainctl.launchers.pod RUN_DIR --attempt N`: the program of each node of a run.

A controller (Kubernetes, SkyPilot) starts it on every node, and again on all of them after a
failure. The first node's is the launcher, with its node's agent as a child. The others ask that
agent's store which attempt it is, and become agents.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from trainctl.config.secrets import REDACTED, resolve_variables
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.launchers.agent.rendezvous import NodeIdentity, find_attempt, find_node_identity
from trainctl.launchers.attempts import is_done, next_attempt, run_attempts, start_one_agent
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, RenderedLaunch, node_command
from trainctl.launchers.processes import send_rest
from trainctl.mirror.fetch import Mirror
from trainctl.plans.types import RunPlan
from trainctl.runs.command import NodeCommand, read_command
from trainctl.runs.directory import is_run, last_attempt, new_attempt, open_run, read_plan, run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.mirror_state import MIRROR
from trainctl.runs.processes import available_cores, wait_while

_WAIT_SECONDS = 600.0
"""Longest wait for the first node: its image may still be pulled."""


def main() -> int:
    """Launch, or become an agent. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.launchers.pod")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--copy", type=Path, help="copy of the run, if this machine may be new")
    given = parser.parse_args()
    try:
        place = find_node_identity(os.environ, node=None, rendezvous=None)
        copy = None if given.copy is None else RunPaths(given.copy)
        if place.node == 0 and copy is not None:
            return _launch(restore_run(given.run_dir, copy, given.attempt), None, sends=True)
        if place.node == 0:
            return _launch(open_run(given.run_dir), given.attempt, sends=False)
        _wait_for(lambda: is_run(given.run_dir), f"{given.run_dir} is not there")
        run = open_run(given.run_dir)
        # The first node may not have brought the submitted plan into the run yet.
        known = run.attempt(last_attempt(run)) if copy is None else copy.attempt(given.attempt)
        plan = read_plan(known.plan)
        if is_done(run, plan):
            return 0
        node, environment = _join(run, plan, place)
    except TrainctlError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    return os.execvpe(node.argv[0], node.argv, environment)


def restore_run(root: Path, copy: RunPaths, number: int) -> RunPaths:
    """Return the run on this machine, whose newest attempt has the submitted plan.

    A new machine gets the run directory, with the newest checkpoint of its mirror.

    Args:
        copy: The run directory as it was submitted.
        number: The submitted attempt. In a run that was restarted on machines, another one may
            have this number.

    Raises:
        TrainctlError: The mirror cannot be read (exit code 4), or is damaged (exit code 5).
    """
    plan = read_plan(copy.attempt(number).plan)
    if not is_run(root):
        _make_run(root, copy.root, plan.config.checkpoint.mirror)
    run = open_run(root)
    newest = last_attempt(run)
    if newest == 0 or read_plan(run.attempt(newest).plan) != plan:
        new_attempt(run, plan)
    return run


def _make_run(root: Path, copy: Path, url: str | None) -> None:
    """Make a run directory from its mirror, or a copy of it if nothing has been sent there yet."""
    root.parent.mkdir(parents=True, exist_ok=True)
    try:
        mirror = None if url is None else Mirror(url)
    except TrainctlError as error:
        if error.exit_code != ExitCode.run_state:  # else nothing has been sent there yet
            raise
        mirror = None
    checkpoint = mirror.checkpoint() if mirror is not None else None
    if mirror is not None and checkpoint is not None:
        # The submitted plan, which becomes the newest attempt's, names the code that runs.
        mirror.fetch(root, [checkpoint], lambda *_: None, trusts_code=True)
        return
    # Whole or not at all: other nodes wait for it.
    incomplete = root.with_name(f"{root.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)
    shutil.copytree(copy, incomplete)
    incomplete.rename(root)


def _launch(run: RunPaths, number: int | None, *, sends: bool) -> int:
    """Run an attempt to its end.

    Args:
        number: As in `next_attempt`.
        sends: Whether the mirror gets all before this returns, as the machine may go then.
    """
    attempt, plan = next_attempt(run, number)
    if is_done(run, plan):
        print(f"nothing to do: {run.root} is at step {plan.stop_step}")
        return 0
    outcome = run_attempts(
        LaunchRequest(
            run=run, attempt=attempt, plan=plan, on_event=lambda _: None, uses_launch_folder=False
        ),
        render=lambda request: RenderedLaunch(command=node_command(request), commands=()),
        start=start_one_agent,
        restarts_itself=False,
    )
    if outcome.message:
        print(outcome.message, flush=True)
    config = plan.config
    sent = 0
    if sends and config.checkpoint.mirror is not None and config.trains_itself:
        sent = send_rest(run, MIRROR, config)  # what an interrupted or failed run has saved, too
    return outcome.exit_code or sent


def _join(run: RunPaths, plan: RunPlan, place: NodeIdentity) -> tuple[NodeCommand, dict[str, str]]:
    """Return the command and environment of this node's agent, once the first node has begun."""
    request = AttemptRequest(
        plan=plan,
        run=run,
        attempt=run.attempt(last_attempt(run)),
        environment=os.environ,
        cores=available_cores(),
    )
    command = node_command(request)
    address, port = place.rendezvous or (command.address, command.port)
    assert address is not None and port is not None
    attempt = run.attempt(find_attempt(run_id(run), address, port, _WAIT_SECONDS))
    _wait_for(attempt.command.is_file, f"{attempt.command} is not there")  # storage may be behind
    node = read_command(attempt).nodes[place.node]
    # The first node's variables, with redacted ones from here.
    written = {name: value for name, value in node.environment.items() if value != REDACTED}
    own = read_plan(attempt.plan).config.launcher.environment
    return node, {**os.environ, **written, **resolve_variables(own, os.environ)}


def _wait_for(condition: Callable[[], bool], problem: str) -> None:
    if not wait_while(lambda: not condition(), _WAIT_SECONDS):
        raise MachineError(
            f"{problem} after {_WAIT_SECONDS:.0f} s",
            hint="the first node's log tells; all nodes must share the run's storage",
        )


if __name__ == "__main__":
    sys.exit(main())
