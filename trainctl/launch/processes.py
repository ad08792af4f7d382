"""Start of a launch's processes: agents, tied programs, launchers in the background, ssh."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.config.hosts import Host
from trainctl.options.launcher.ssh import SshConfig
from trainctl.runs.command import NodeCommand
from trainctl.runs.failures import describe
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import name_holder
from trainctl.runs.processes import PARENT_VARIABLE, RunTag, pdeathsig_command

Process = subprocess.Popen[bytes]

CONNECT_SECONDS = 10
_OPEN_FILES = 65_536


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A single process: the agent of this machine, or one program (srun, mpirun) for all nodes."""

    process: Process
    log: Path
    name: str
    """Name of the process in the message about its death."""
    node: int | None = None
    """Number of its node; None if it stands for all of them."""
    margin_seconds: float = 1.0
    """Seconds beyond the grace that it may take to end its ranks and itself."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self.process.terminate()

    def describe_death(self) -> dict[str, Any]:
        assert self.process.returncode is not None
        fields = describe(self.process.returncode, self.log)
        where = f"node {self.node}, " if self.node is not None else ""
        fields["message"] = f"{self.name} ({where}process {self.process.pid}) {fields['message']}"
        return {
            "rank": None,
            "node": self.node,
            "host": socket.gethostname(),
            "pid": self.process.pid,
            **fields,
        }


def start_agent(
    node: NodeCommand, *, tag: RunTag, log: Path, lock: int, folder: Path | None
) -> AgentProcess:
    """Start an agent on this machine, in a session of its own: Ctrl-C reaches only the launcher.

    It inherits the run's lock, and ends when its launcher does.
    """
    with log.open("ab") as stream:
        process = subprocess.Popen(
            node.argv,
            cwd=folder,
            env=_variables(replace(tag, node=node.node), node.environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=(lock,),
        )
    return AgentProcess(process, log, "the agent", node=node.node)


def start_with_pdeathsig(
    argv: Sequence[str],
    *,
    tag: RunTag,
    environment: Mapping[str, str] | None = None,
    log: Path,
    lock: int | None = None,
    has_input: bool = False,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Process:
    """Start a program that is not ours (ssh, srun, mpirun); the kernel ends it with this process.

    Args:
        environment: Variables added to this process's.
        lock: Descriptor of the run's lock, if the program is to inherit it.
        has_input: Whether this process writes its stdin, unbuffered; else its stdin is empty.
        death_signal: Signal that it gets when this process ends.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            [*pdeathsig_command(death_signal), *argv],
            env=_variables(tag, environment or {}),
            stdin=subprocess.PIPE if has_input else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            bufsize=0,
            start_new_session=True,
            pass_fds=() if lock is None else (lock,),
        )


def _variables(tag: RunTag, environment: Mapping[str, str]) -> dict[str, str]:
    return {
        **os.environ,
        **environment,
        **tag.environment(),
        PARENT_VARIABLE: str(os.getpid()),
    }


def start_in_background(
    run: RunPaths, attempt: AttemptPaths, lock: int, *, dies_with_parent: bool = False
) -> Process:
    """Start the attempt's launcher in a session of its own; its output goes to `launcher.log`.

    It inherits the run's lock, so no other process can take the run when this process ends.

    Args:
        dies_with_parent: Whether the launcher gets SIGTERM when this process ends.
    """
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if dies_with_parent:
        environment[PARENT_VARIABLE] = str(os.getpid())
    command = [sys.executable, "-P", "-m", "trainctl.launch", str(run.root)]
    command += ["--attempt", str(attempt.number), "--lock", str(lock)]
    with attempt.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    name_holder(lock, process.pid)
    return process


def ssh(host: Host, launcher: SshConfig, module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that runs a module of trainctl on a host.

    It never prompts, uses no connection that another process made, and notices within
    `launcher.node_timeout_seconds` that the host is gone.
    """
    options = {
        "BatchMode": "yes",
        "ClearAllForwardings": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ControlMaster": "no",
        "ControlPath": "none",
        "ServerAliveCountMax": 3,
        "ServerAliveInterval": max(1, int(launcher.node_timeout_seconds / 3)),
    }
    return (
        "ssh",
        *(("-F", launcher.ssh_config) if launcher.ssh_config is not None else ()),
        *(word for name, value in options.items() for word in ("-o", f"{name}={value}")),
        "-T",
        "--",
        host.name,
        # -P: import nothing from the home directory there.
        shell_line((launcher.python or sys.executable, "-P", "-m", module, *arguments)),
    )


def allow_many_files() -> None:
    """Raise this process's limit of open files, as far as it may.

    Each host takes up to three files, and a usual limit of 1024 ends at 340 hosts.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if most == resource.RLIM_INFINITY else min(_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def shell_line(argv: Sequence[str]) -> str:
    """Return a line that makes any shell exec the command, whatever characters it has."""
    return f"exec {shlex.join(argv)}"
