"""`python -m trainctl.launchers.pod RUN_DIR --attempt N`: the program of each pod of a run.

The first pod is the launcher, with its node's agent as a child. The other pods wait until it has
made the attempt, and become agents. When the controller restarts all pods, the number of the new
attempt follows from the controller's count of restarts, so that all pods agree on it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from trainctl.config.secrets import REDACTED, resolve_variables
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers import kubernetes
from trainctl.launchers.attempts import (
    AgentProcess,
    PreparedAttempt,
    run_attempts,
    start_one_agent,
)
from trainctl.launchers.interface import LaunchRequest, RenderedLaunch
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.command import NodeCommand, read_command
from trainctl.runs.directory import last_attempt, new_attempt, open_run, read_plan
from trainctl.runs.files import write_json
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import NODE_VARIABLE

_WAIT_SECONDS = 600.0
"""Longest wait for the first pod to make the attempt: its image may still be pulled."""
_POLL_SECONDS = 0.5
READY = "pods.json"
"""Name of the attempt's file that the first pod writes when the other pods may go on."""


def main() -> int:
    """Launch, or become an agent. Return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.launchers.pod")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    given = parser.parse_args()
    restarts = int(os.environ.get(kubernetes.RESTART_VARIABLE) or 0)
    try:
        run = open_run(given.run_dir)
        attempt = run.attempt(given.attempt + restarts)
        if os.environ.get(NODE_VARIABLE, "0") == "0":
            return _launch(run, attempt)
        node = _await_node(run, attempt)
        environment = _agent_environment(attempt, node) if node is not None else {}
    except TrainctlError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return int(error.exit_code)
    if node is not None:
        os.execvpe(node.argv[0], node.argv, environment)
    return 0


def _launch(run: RunPaths, attempt: AttemptPaths) -> int:
    plan = read_plan(run.attempt(min(attempt.number, last_attempt(run))).plan)
    while last_attempt(run) < attempt.number:
        new_attempt(run, plan)
    checkpoint, _ = newest_checkpoint(run)
    if checkpoint is not None and checkpoint.step >= plan.stop_step:
        print(f"nothing to do: {run.root} is at step {checkpoint.step}")
        write_json(attempt.root / READY, {"done": True})
        return 0

    def start(prepared: PreparedAttempt) -> AgentProcess:
        agent = start_one_agent(prepared)
        write_json(attempt.root / READY, {"done": False})
        return agent

    outcome = run_attempts(
        LaunchRequest(
            run=run, attempt=attempt, plan=plan, on_event=lambda _: None, uses_launch_folder=False
        ),
        render=lambda request: RenderedLaunch(command=kubernetes.pod_command(request), commands=()),
        start=start,
        restarts_itself=False,
    )
    if outcome.message:
        print(outcome.message)
    return outcome.exit_code


def _agent_environment(attempt: AttemptPaths, node: NodeCommand) -> dict[str, str]:
    """Return an agent's environment: the first pod's variables, with redacted ones from here."""
    written = {name: value for name, value in node.environment.items() if value != REDACTED}
    own = read_plan(attempt.plan).config.launcher.environment
    return {**os.environ, **written, **resolve_variables(own, os.environ)}


def _await_node(run: RunPaths, attempt: AttemptPaths) -> NodeCommand | None:
    """Wait until the first pod has made the attempt; return this pod's command, None if done."""
    ready = attempt.root / READY
    deadline = time.monotonic() + _WAIT_SECONDS
    while not ready.exists():
        if time.monotonic() > deadline:
            raise TrainctlError(
                f"the first pod has not made attempt {attempt.number} in {_WAIT_SECONDS:.0f} s",
                hint=f"its log tells; {run.root} must be on storage that all pods share",
                exit_code=ExitCode.environment,
            )
        time.sleep(_POLL_SECONDS)
    if b'"done": true' in ready.read_bytes():
        return None
    return read_command(attempt).nodes[int(os.environ[NODE_VARIABLE])]


if __name__ == "__main__":
    sys.exit(main())
