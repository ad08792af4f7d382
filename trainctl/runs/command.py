"""`command.json`: the commands of an attempt on each node. A launcher writes it, agents read it.

`python -m trainctl.runs.command` is the entry of each rank: it ties the process to its agent, opens
its log, and executes the rank's command. A rank must not outlive the agent from its first instant,
and stdout and stderr go to one file, whatever its command is. Both settings survive `exec`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.config.secrets import resolve_words
from trainctl.runs.files import open_as_its_folder, write_json
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import SIGTERM_SAVES_VARIABLE, RunTag, die_with_parent
from trainctl.runs.provenance import redact_environment

COMMAND_SCHEMA = 1
"""Version of `command.json`."""

FORK_FLAG = "--fork"
"""Flag of a rank command with `AttemptCommand.is_forked`: import what ranks need, then fork them.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """Command of one agent."""

    node: int
    """Number of the node, from 0."""
    host: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    """Variables for it and its ranks, added to the inherited ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCommand:
    """Commands of all agents of an attempt, and of their ranks."""

    nodes: tuple[NodeCommand, ...]
    ranks_per_node: int
    """Ranks that each agent starts."""
    rank_command: tuple[str, ...]
    """Command line of every rank; the rank's number is in `RANK`."""
    prepare: bool = True
    """Whether the agent prepares the corpus before the ranks start."""
    is_users: bool = False
    """Whether the ranks run a program or function of the user's: their heartbeats are then unknown,
    and a nonzero exit code only means that they failed.
    """
    is_forked: bool = False
    """Whether one process of a node imports for all of its ranks, which it then forks."""
    folder: str | None = None
    """Working directory of agents and ranks; None is the launcher's current folder."""
    port: int | None = None
    """Port of the rendezvous; None takes a free one."""
    address: str | None = None
    """Name or address of the first node, where the rendezvous is; None on a single node, and where
    an agent learns it when it is started.
    """
    hidden: tuple[str, ...] = ()
    """Names of variables whose values are redacted in the file."""
    schema: int = COMMAND_SCHEMA


def command_record(command: AttemptCommand) -> dict[str, Any]:
    """Return the command as plain JSON, with values of possibly secret variables redacted."""
    record: dict[str, Any] = to_plain(command)
    for node in record["nodes"]:
        node["environment"] = redact_environment(node["environment"], command.hidden)
    return record


def write_command(attempt: AttemptPaths, command: AttemptCommand) -> None:
    """Write the attempt's `command.json`."""
    write_json(attempt.command, command_record(command))


def read_command(attempt: AttemptPaths) -> AttemptCommand:
    """Read the attempt's `command.json`."""
    return from_plain(AttemptCommand, read_json(attempt.command))


PROCESSORS_VARIABLE = "TRAINCTL_PROCESSORS"
"""Set by the agent where ranks are bound: CPU cores of each local rank, as JSON."""
BENCHMARK_VARIABLE = "TRAINCTL_BENCHMARK"
"""Set by the agent where ranks are measured before they train."""


def main() -> None:
    """Execute the rank's command; exit with 127, as a shell does, if it cannot be started."""
    ignore_scheduler_sigterm()
    attempt = begin_rank()
    started = read_command(attempt)
    command = started.rank_command
    if started.is_users:
        command = tuple(resolve_words(command, os.environ))
    if BENCHMARK_VARIABLE in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
        command = (sys.executable, "-P", "-m", "trainctl.launchers.agent.benchmark", *command)
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


def begin_rank() -> AttemptPaths:
    """Tie this process to the agent, open its log, bind its CPU cores; return the attempt."""
    die_with_parent()
    tag = RunTag.from_environment(os.environ)
    assert tag.attempt is not None
    attempt = RunPaths(tag.directory).attempt(tag.attempt)
    path = attempt.rank_log(int(os.environ["RANK"]))
    log = open_as_its_folder(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stdout.fileno())
    os.dup2(log, sys.stderr.fileno())
    os.close(log)
    if PROCESSORS_VARIABLE in os.environ:
        shares = json.loads(os.environ[PROCESSORS_VARIABLE])
        os.sched_setaffinity(0, shares[int(os.environ["LOCAL_RANK"])])
    return attempt


if __name__ == "__main__":
    main()
