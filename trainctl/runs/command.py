"""`command.json`: the commands of an attempt on each node. A launcher writes it, agents read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.runs.files import write_json
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.provenance import redact

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
        node["environment"] = redact(node["environment"], command.hidden)
    return record


def write_command(attempt: AttemptPaths, command: AttemptCommand) -> None:
    """Write the attempt's `command.json`."""
    write_json(attempt.command, command_record(command))


def read_command(attempt: AttemptPaths) -> AttemptCommand:
    """Read the attempt's `command.json`."""
    return from_plain(AttemptCommand, read_json(attempt.command))
