"""`command.json`: what an attempt starts on each node; a launcher writes it, the agents read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.provenance import redact

COMMAND_SCHEMA = 1
"""Version of `command.json`."""

FORK_FLAG = "--fork"
"""For a command of `AttemptCommand.is_forked`: import what ranks need, and become them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """One agent."""

    node: int
    """Number of the node, from 0."""
    host: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    """Variables set for it and its ranks, beside those it inherits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptCommand:
    """All agents of an attempt, and what each starts."""

    nodes: tuple[NodeCommand, ...]
    ranks_per_node: int
    """Ranks that each starts."""
    rank_command: tuple[str, ...]
    """Command line of every rank; which one it is, it reads from `RANK`."""
    prepare: bool = True
    """Whether the agent prepares the corpus before the ranks start."""
    is_users: bool = False
    """Whether the ranks run a program or function of the user's: then nothing is known of their
    heartbeats, and an exit code of theirs says no more than that they failed."""
    is_forked: bool = False
    """Whether one process of a node imports for all of its ranks, which it then forks."""
    folder: str | None = None
    """Where agents and ranks run; None is the launcher's current folder."""
    port: int | None = None
    """Rendezvous port; None takes a free one."""
    address: str | None = None
    """Name or number of the first node, where the rendezvous is; None on a single node, and where
    an agent learns it when it is started."""
    hidden: tuple[str, ...] = ()
    """Names of variables whose values are not written."""
    schema: int = COMMAND_SCHEMA


def command_record(command: AttemptCommand) -> dict[str, Any]:
    """Return the command as it may be shown: without values of variables that may be secrets."""
    record: dict[str, Any] = to_plain(command)
    for node in record["nodes"]:
        node["environment"] = redact(node["environment"], command.hidden)
    return record


def write_command(attempt: AttemptPaths, command: AttemptCommand) -> None:
    """Record the command in the attempt's `command.json`."""
    write_json(attempt.command, command_record(command))


def read_command(attempt: AttemptPaths) -> AttemptCommand:
    """Return the command of an attempt."""
    return from_plain(AttemptCommand, read_json(attempt.command))
