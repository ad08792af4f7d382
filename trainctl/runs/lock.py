"""The run's lock: one launch at a time in a run directory, by an flock that ends with its holders.

The launcher takes it and its agent inherits the descriptor, so the lock is free only once both are
gone: after `kill -9` of the launcher, when its agent has ended every rank. Ranks do not inherit it.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.runs.failures import cause_of_disk
from trainctl.runs.files import is_locked, open_lock
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import is_alive

_held: dict[tuple[str, int], int] = {}
"""Descriptors of the locks that this process holds, by path and thread."""

_CLEANUP_SECONDS = 10.0
_LOOK_SECONDS = 0.5
"""Longest time that `find_holder` locks the file, or that a new holder is not written in yet."""

_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Holder:
    """Process that is written into the lock's file."""

    pid: int
    host: str
    since: float
    """Time at which it was written in, in Unix seconds."""


@contextmanager
def hold_lock(run: RunPaths, *, patience_seconds: float = _CLEANUP_SECONDS) -> Iterator[int]:
    """Hold the run's lock, and yield its descriptor, for agents to inherit.

    A thread may take it again while it holds it.

    Args:
        patience_seconds: Longest wait for the agent of a dead launcher to end its ranks. A live
            launcher is not waited for.

    Raises:
        TrainctlError: Another launch holds it (exit code 5); names its pid and host. Or the folder
            cannot be written, or its file system has no locks (exit code 4).
    """
    path = str(run.lock)
    mine = path, threading.get_ident()
    if mine in _held:
        yield _held[mine]
        return
    try:
        descriptor = open_lock(run.lock)
    except OSError as error:
        fault = cause_of_disk(error)
        raise MachineError(
            f"{run.root} cannot be written: {error.strerror}", hint=fault.hint if fault else ""
        ) from None
    try:
        _acquire(run, descriptor, patience_seconds)
        with _written_in(path, descriptor):
            yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def inherit_lock(run: RunPaths, descriptor: int) -> Iterator[int]:
    """Keep holding a lock whose descriptor this process inherited, and yield the descriptor.

    The process that took it may end: this one has held the lock from its start.

    Args:
        descriptor: Descriptor from the parent's `hold_lock`.
    """
    try:
        with _written_in(str(run.lock), descriptor):
            yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _written_in(path: str, descriptor: int) -> Iterator[None]:
    """Write this process into the lock's file; clear it unless a child has written itself in."""
    me, mine = os.getpid(), (path, threading.get_ident())
    name_holder(descriptor, me)
    _held[mine] = descriptor
    try:
        yield
    finally:
        del _held[mine]
        if _read(descriptor).pid == me:
            os.ftruncate(descriptor, 0)


def name_holder(descriptor: int, pid: int) -> None:
    """Write the holder's pid, this process's or a child's, into the lock's file."""
    record = asdict(Holder(pid, socket.gethostname(), time.time()))
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(record).encode() + b"\n", 0)


def find_holder(run: RunPaths) -> Holder | None:
    """Return the process that holds the run's lock now; None if it is free.

    A holder that cannot be read (it is writing itself in, or is another user's) has pid 0.
    """
    try:
        descriptor = os.open(run.lock, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError:  # another user's: only a launch on this machine is visible
        return Holder(0, "", 0.0) if is_locked(run.lock) else None
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor)
    except OSError:  # no launch runs where locks are missing: an archive, say
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def _acquire(run: RunPaths, descriptor: int, patience_seconds: float) -> None:
    start, is_said = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            current = _read(descriptor)
        except OSError as error:
            raise MachineError(
                f"{run.lock} cannot be locked: {error.strerror}",
                hint="runs need a file system with flock: Lustre is to be mounted with -o flock, "
                "NFS without nolock",
            ) from None
        is_here = current.host == socket.gethostname()
        is_dead = is_here and not is_alive(current.pid)
        # The file may name a launch that was killed on another machine, while
        # `find_holder` briefly has the lock. Only a launch of this machine is known to hold it.
        patience = patience_seconds if is_dead else 0.0 if is_here else _LOOK_SECONDS
        if time.monotonic() - start >= patience:
            raise _in_use_error(run, current, is_dead)
        if is_dead and not is_said:
            is_said = True
            print(
                f"waiting for processes of an ended launch (process {current.pid}) of {run.root} "
                f"to end, for {patience_seconds:.0f} s at most",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_POLL_SECONDS)


def _read(descriptor: int) -> Holder:
    try:
        return Holder(**json.loads(os.pread(descriptor, 4096, 0)))
    except (ValueError, TypeError):
        return Holder(0, "", 0.0)


def _in_use_error(run: RunPaths, current: Holder, is_dead: bool) -> TrainctlError:
    if is_dead:
        message = f"{run.root}: processes of an ended launch (process {current.pid}) are still here"
        hint = "they may be stuck in the kernel; look for its id in /proc/*/environ"
    elif current.pid == 0:
        message = f"{run.root} is in use by another launch"
        hint = "wait for it to end, or name another run directory"
    else:
        message = f"{run.root} is in use by another launch: process {current.pid} on {current.host}"
        hint = "wait for it to end, stop it, or name another run directory"
    return RunStateError(message, hint=hint)
