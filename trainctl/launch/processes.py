"""Processes of a launch: tied to their starter, in the background, over ssh, of a scheduler."""

from __future__ import annotations

import os
import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainctl.config.hosts import Host
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.launcher.ssh import SshConfig
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import name_holder
from trainctl.runs.processes import PARENT_VARIABLE, RunTag

Process = subprocess.Popen[bytes]

_TOOL_SECONDS = 60
CONNECT_SECONDS = 10
_OPEN_FILES = 65_536


def start_agent(
    argv: Sequence[str],
    *,
    tag: RunTag,
    environment: Mapping[str, str],
    log: Path,
    lock: int,
    folder: Path | None = None,
) -> Process:
    """Start an agent on this machine, in a session of its own: Ctrl-C reaches only the launcher.

    It inherits the run's lock, and ends when its launcher does.

    Args:
        environment: Variables added to this process's.
        log: File that stdout and stderr are appended to.
        lock: Descriptor of the run's lock.
        folder: Its working directory; None is the current one.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            argv,
            cwd=folder,
            env=_variables(tag, environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=(lock,),
        )


def start_tied(
    argv: Sequence[str],
    *,
    tag: RunTag,
    environment: Mapping[str, str] | None = None,
    log: Path,
    lock: int | None = None,
    folder: Path | None = None,
    has_input: bool = False,
    death_signal: signal.Signals = signal.SIGKILL,
) -> Process:
    """Start a program that is not ours (ssh, srun, mpirun); the kernel ends it with this process.

    Args:
        environment: Variables added to this process's.
        log: File that stdout and stderr are appended to.
        lock: Descriptor of the run's lock, if the program is to inherit it.
        folder: Its working directory; None is the current one.
        has_input: Whether this process writes its stdin, unbuffered; else its stdin is empty.
        death_signal: Signal that it gets when this process ends.
    """
    with log.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "trainctl.runs.tied_entry", str(int(death_signal)), *argv],
            cwd=folder,
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
    run: RunPaths, attempt: AttemptPaths, lock: int, *, is_tied: bool = False
) -> Process:
    """Start the attempt's launcher in a session of its own; its output goes to `launcher.log`.

    It inherits the run's lock, so no other process can take the run when this process ends.

    Args:
        attempt: The attempt, made already.
        lock: Descriptor of the run's lock.
        is_tied: Whether the launcher gets SIGTERM when this process ends.
    """
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if is_tied:
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


def run_tool(command: Sequence[str], *, text: str | None = None) -> str:
    """Run a scheduler's command to its end, and return its output.

    Args:
        text: Its standard input.

    Raises:
        TrainctlError: It is not installed, fails, or does not answer within a minute (exit code 4).
    """
    try:
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, timeout=_TOOL_SECONDS
        )
    except FileNotFoundError:
        raise TrainctlError(
            f"{command[0]} is not installed on this machine",
            hint=f"repeat this where {command[0]} is",
            exit_code=ExitCode.environment,
        ) from None
    except subprocess.TimeoutExpired:
        raise TrainctlError(
            f"{command[0]} does not answer", exit_code=ExitCode.environment
        ) from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise TrainctlError(
            f"{command[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}",
            exit_code=ExitCode.environment,
        )
    return done.stdout
