"""Starting agents, or programs that stand for them, on the launcher's own machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainctl.runs.processes import PARENT_VARIABLE, RunTag

Process = subprocess.Popen[bytes]


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
