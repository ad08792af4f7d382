"""`python -m trainctl.launchers.pod RUN_DIR --attempt N`: the program of each node of a run.

A Kubernetes controller starts it on every node, and again on all of them after a
failure. The first node's is the launcher, with its node's agent as a child. The others ask that
agent's store which attempt it is, and become agents.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from trainctl.config.secrets import REDACTED, resolve_variables
from trainctl.errors import MachineError, TrainctlError
from trainctl.launchers.agent.rendezvous import NodeIdentity, find_attempt, find_node_identity
from trainctl.launchers.attempts import is_done, next_attempt, run_attempts, start_one_agent
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, RenderedLaunch, node_command
from trainctl.plans.types import RunPlan
from trainctl.runs.command import NodeCommand, read_command
from trainctl.runs.directory import is_run, last_attempt, open_run, read_plan, run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import available_cores, wait_while

_WAIT_SECONDS = 600.0
"""Longest wait for the first node: its image may still be pulled."""


def main() -> int:
    """Launch, or become an agent. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.launchers.pod")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    given = parser.parse_args()
    try:
        place = find_node_identity(os.environ, node=None, rendezvous=None)
        if place.node == 0:
            return _launch(open_run(given.run_dir), given.attempt)
        _wait_for(lambda: is_run(given.run_dir), f"{given.run_dir} is not there")
        run = open_run(given.run_dir)
        plan = read_plan(run.attempt(last_attempt(run)).plan)
        if is_done(run, plan):
            return 0
        node, environment = _join(run, plan, place)
    except TrainctlError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    return os.execvpe(node.argv[0], node.argv, environment)


def _launch(run: RunPaths, number: int) -> int:
    """Run an attempt to its end.

    Args:
        number: As in `next_attempt`.
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
    return outcome.exit_code


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
