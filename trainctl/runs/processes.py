"""Process hygiene: which process ends with which, and how a run's processes are found and ended.

Linux only. Every process of a run inherits the variables of its `RunTag`. A process that outlives
its parent, or was forked by a rank, still shows them in `/proc/<pid>/environ`; one that ended does
not.

`python -m trainctl.runs.processes pdeathsig SIGNAL COMMAND ...` runs a command that gets the signal
when its parent ends: for programs that are not ours (ssh, srun, mpirun) and would outlive a
launcher that is killed. `... terminate RUN_DIR RUN_ID [--attempt N]` ends a run's processes on this
machine: for a node whose agent did not end in good order. `... exec` executes the command that the
first line of its stdin describes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainctl.errors import ExitCode, MachineError
from trainctl.runs.layout import RUN_ID_VARIABLE

RUN_DIRECTORY_VARIABLE = "TRAINCTL_RUN_DIR"
ATTEMPT_VARIABLE = "TRAINCTL_ATTEMPT"
NODE_VARIABLE = "TRAINCTL_NODE"
PARENT_VARIABLE = "TRAINCTL_PARENT_PID"
"""Pid of the process that started an agent or rank, and that the agent or rank must not outlive."""

LEASE_VARIABLE = "TRAINCTL_LEASE_SECONDS"
"""Variable of an agent on another machine: longest silence of its launcher on stdin, in seconds."""
LEASE_BEAT = b"."
LEASE_END = b"T"
"""Bytes that a launcher writes there: a sign of life, and the order to end the node's ranks."""

SIGTERM_SAVES_VARIABLE = "TRAINCTL_SIGTERM_SAVES"
"""Variable that is set where a scheduler announces the end of a job by SIGTERM to all of its
processes: ranks then ignore it, and the first one to an agent asks for a save.
"""

STORE_VARIABLE = "TRAINCTL_STORE"
"""Variable of a single node's ranks: the file of their rendezvous, in place of a port."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.02
_WAITING_SECONDS = 0.1
_SETTLE_SECONDS = 0.03
"""Pause between the last two looks: in the middle of an exec a process shows no environment."""
_KILL_PATIENCE_SECONDS = 2.0
"""Longest time for a killed process to end, unless it is stuck in the kernel."""


@dataclass(frozen=True, slots=True)
class RunTag:
    """Mark by which the processes of a run are found: their environment variables.

    The directory is part of it: a copy of a run's directory, resumed beside the original, has the
    same id, and the two must not end each other.
    """

    run_id: str
    directory: Path
    """The run's directory, absolute."""
    attempt: int | None = None
    """Number of one attempt; None matches all attempts."""
    node: int | None = None
    """Number of one node; None matches all nodes, and is the tag of what starts the agents. Two
    agents on one machine must not end each other.
    """

    def environment(self) -> dict[str, str]:
        """Return the variables that a process must be started with."""
        variables = {RUN_ID_VARIABLE: self.run_id, RUN_DIRECTORY_VARIABLE: str(self.directory)}
        if self.attempt is not None:
            variables[ATTEMPT_VARIABLE] = str(self.attempt)
        if self.node is not None:
            variables[NODE_VARIABLE] = str(self.node)
        return variables

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> RunTag:
        """Return the tag that this process was started with."""
        return cls(
            environment[RUN_ID_VARIABLE],
            Path(environment[RUN_DIRECTORY_VARIABLE]),
            int(environment[ATTEMPT_VARIABLE]),
            int(node) if (node := environment.get(NODE_VARIABLE)) else None,
        )


def processes_of(tag: RunTag) -> set[int]:
    """Return the pids of all live processes that carry the tag."""
    wanted = {os.fsencode(f"{name}={value}") for name, value in tag.environment().items()}
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                environment = (process / "environ").read_bytes()
            except OSError:  # it ended, or is another user's
                continue
            if wanted <= set(environment.split(b"\0")):
                found.add(int(process.name))
    return found


def terminate_processes(
    tag: RunTag, *, grace_seconds: float, keep: Collection[int] = ()
) -> set[int]:
    """End every process that carries the tag: SIGTERM to all, one grace for all, SIGKILL.

    Args:
        grace_seconds: Time between the two signals; 0 kills at once.
        keep: Pids to leave alone, besides this process.

    Returns:
        Pids that even SIGKILL did not end (stuck in the kernel); usually empty.
    """
    kept = {os.getpid(), *keep}
    deadline = time.monotonic() + grace_seconds
    asked: set[int] = set()
    settled = False
    while True:
        alive = processes_of(tag) - kept
        now = time.monotonic()
        if not alive:
            if settled:
                return set()
            settled = True
            time.sleep(_SETTLE_SECONDS)
            continue
        settled = False
        if now > deadline + _KILL_PATIENCE_SECONDS:
            return alive
        if now >= deadline:
            _send_signal(alive, signal.SIGKILL)
        else:
            _send_signal(alive - asked, signal.SIGTERM)
            asked |= alive
        time.sleep(_POLL_SECONDS)


def wait_while(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait as long as a condition holds, at most some seconds; return whether it ended."""
    deadline = time.monotonic() + seconds
    while (holds := condition()) and time.monotonic() < deadline:
        time.sleep(_WAITING_SECONDS)
    return not holds


def die_with_parent(expected_pid: int | None = None, *, death_signal: int = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends; exit now if the parent has ended.

    The parent is, precisely, the thread that started this process. The setting outlives `exec`,
    but children do not inherit it.

    Args:
        expected_pid: Pid of the parent; None takes it from `TRAINCTL_PARENT_PID`, and without that
            variable (a rank started by hand) nothing is done.
    """
    if expected_pid is None:
        value = os.environ.get(PARENT_VARIABLE)
        if value is None:
            return
        expected_pid = int(value)
    _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != expected_pid:
        print(f"trainctl: process {expected_pid}, which started this one, is gone", file=sys.stderr)
        sys.stderr.flush()
        os._exit(128 + signal.SIGKILL)


def pdeathsig_command(death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return the words before a command that is to get the signal when this process ends.

    The command must be started with this process's pid in `PARENT_VARIABLE`.
    """
    module = ("-P", "-m", "trainctl.runs.processes")
    return [sys.executable, *module, "pdeathsig", str(int(death_signal))]


def adopt_orphans() -> None:
    """Become the parent of descendants whose parent ends, in place of the machine's init process.

    Children do not inherit the setting.
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def block_sigterm() -> Iterator[None]:
    """Block a scheduler's SIGTERM, so that a rank started here cannot get it before it ignores it.

    The rank inherits the signal mask, and `trainctl.runs.command` unblocks the signal.
    """
    blocked = {signal.SIGTERM} if SIGTERM_SAVES_VARIABLE in os.environ else set()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Import without garbage collection.

    Each collection traverses everything imported so far, none of which is garbage: it took a sixth
    of a rank's start. Later collections skip the imported objects, too (`gc.freeze`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


FULL_COLLECTION_EVERY = 50
"""Steps between full collections. Cycles that outlive young collections are rare: an evaluation or
a checkpoint leaves some, and few steps have one."""
_NEVER = 1_000_000_000
"""Threshold that no count of young collections reaches."""


@contextmanager
def full_collections_at_steps() -> Iterator[Callable[[int], None]]:
    """Make full garbage collections within the context only at the same steps on all ranks.

    A full collection traverses all objects: 0.3 s for 560,000 of them. A rank that makes one by
    itself lets all others wait. Young collections, a millisecond each, go on: cycles may hold
    device memory.

    Yields:
        Function to call when everything is built, with 0, and after each step, with its number. It
        collects, and freezes what the start and the first step of this process have built.
    """
    before, steps = gc.get_threshold(), 0

    def collect(step: int) -> None:
        nonlocal steps
        if steps < 2 or step % FULL_COLLECTION_EVERY == 0:
            gc.collect()
        if steps < 2:
            gc.freeze()
        steps += 1

    gc.set_threshold(*before[:2], _NEVER)
    try:
        yield collect
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def encode_command(argv: Sequence[str], environment: Mapping[str, str], folder: Path) -> bytes:
    """Return the line on stdin from which `... exec` executes a command on another machine.

    So neither arguments nor variables pass through the remote shell, and no process list shows them
    before the command runs.

    Args:
        environment: Variables added to the remote login's.
    """
    record = {"argv": list(argv), "environment": dict(environment), "folder": str(folder)}
    return json.dumps(record).encode() + b"\n"


def available_cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


def is_alive(pid: int) -> bool:
    """Return True if a process of this machine runs; a zombie does not."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _send_signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            continue


def _run_with_pdeathsig(death_signal: int, command: list[str]) -> None:
    """Execute a command tied to its parent; exit with 127, as a shell does, if it cannot start.

    The parent's pid is not passed on: on another machine it would name an unrelated process.
    """
    die_with_parent(death_signal=death_signal)
    os.environ.pop(PARENT_VARIABLE, None)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _run_from_stdin() -> int:
    """Execute the command in the first line of stdin; the rest of stdin is the command's.

    Returns only if that fails.
    """
    record = json.loads(_read_line(sys.stdin.fileno()))
    folder, argv = record["folder"], record["argv"]
    try:
        os.chdir(folder)
    except OSError as error:
        print(f"error: the folder {folder} is not there: {error.strerror}", file=sys.stderr)
        return int(ExitCode.environment)
    try:
        os.execvpe(argv[0], argv, {**os.environ, **record["environment"]})
    except OSError as error:
        print(f"error: cannot start {argv[0]}: {error.strerror}", file=sys.stderr)
        return int(ExitCode.environment)


def _read_line(descriptor: int) -> bytes:
    """Read a line and not a byte more: the command reads what follows."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            raise SystemExit("error: the launcher ended before it said what to start")
        line += byte
    return bytes(line)


def _terminate(arguments: list[str]) -> int:
    """Return 0 if no process is left; 1 if SIGKILL did not end some, whose pids are printed."""
    import argparse

    parser = argparse.ArgumentParser(prog="python -m trainctl.runs.processes terminate")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("run_id")
    parser.add_argument("--attempt", type=int)
    parser.add_argument("--grace-seconds", type=float, default=0.0)
    given = parser.parse_args(arguments)
    tag = RunTag(given.run_id, given.run_dir, given.attempt)
    stuck = terminate_processes(tag, grace_seconds=given.grace_seconds)
    if stuck:
        print(*sorted(stuck))
    return int(bool(stuck))


if __name__ == "__main__":
    if sys.argv[1] == "pdeathsig":
        _run_with_pdeathsig(int(sys.argv[2]), sys.argv[3:])
    elif sys.argv[1] == "exec":
        raise SystemExit(_run_from_stdin())
    else:
        raise SystemExit(_terminate(sys.argv[2:]))


_SECONDS = 60


def run_tool(
    command: Sequence[str], *, seconds: float = _SECONDS, accepted: Collection[int] = ()
) -> str:
    """Run a scheduler's command to its end, and return its output.

    Args:
        accepted: Exit codes besides 0 that are no failure of the command.

    Raises:
        TrainctlError: It is not installed, fails, or does not end in time (exit code 4).
    """
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise MachineError(
            f"{command[0]} is not installed on this machine",
            hint=f"repeat this where {command[0]} is",
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{command[0]} does not answer") from None
    if done.returncode not in (0, *accepted):
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise MachineError(
            f"{command[0]} failed: {output[-1] if output else f'exit code {done.returncode}'}"
        )
    return done.stdout
