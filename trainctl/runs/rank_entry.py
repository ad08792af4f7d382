"""Entry of each rank: tie the process to its agent, open its log, execute its command.

A rank must not outlive the agent from its first instant, and stdout and stderr go to one file,
whatever its command is. Both settings survive `exec`.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from trainctl.config.secrets import resolve_words
from trainctl.runs.command import read_command
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import SIGTERM_SAVES_VARIABLE, RunTag, die_with_parent

PROCESSORS_VARIABLE = "TRAINCTL_PROCESSORS"
"""Set by the agent where ranks are bound: CPU cores of each local rank, as JSON."""
BENCHMARK_VARIABLE = "TRAINCTL_BENCHMARK"
"""Set by the agent where ranks are measured before they train."""


def main() -> None:
    """Execute the rank's command; exit with 127, as a shell does, if it cannot be started."""
    ignore_scheduler_sigterm()
    attempt = begin()
    started = read_command(attempt)
    command = started.rank_command
    if started.is_users:
        command = tuple(resolve_words(command, os.environ))
    if BENCHMARK_VARIABLE in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        command = (sys.executable, "-P", "-m", "trainctl.launch.agent.benchmark", *command)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def ignore_scheduler_sigterm() -> None:
    """Ignore SIGTERM where a scheduler sends it as a notice: the agent handles it."""
    if SIGTERM_SAVES_VARIABLE in os.environ:
        # Ignore, then unblock: the agent blocked it, so that none arrives before this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def begin() -> AttemptPaths:
    """Tie this process to the agent, open its log, bind its CPU cores; return the attempt."""
    die_with_parent()
    tag = RunTag.from_environment(os.environ)
    assert tag.attempt is not None
    attempt = RunPaths(tag.directory).attempt(tag.attempt)
    log = os.open(
        attempt.rank_log(int(os.environ["RANK"])), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    if PROCESSORS_VARIABLE in os.environ:
        shares = json.loads(os.environ[PROCESSORS_VARIABLE])
        os.sched_setaffinity(0, shares[int(os.environ["LOCAL_RANK"])])
    return attempt


if __name__ == "__main__":
    main()
