"""Description of a process that died: its cause, how it ended, what its log says, what may help."""

from __future__ import annotations

import errno
import re
import signal
import tempfile
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from trainctl.config.reading import open_file
from trainctl.errors import ExitCode
from trainctl.runs.records import Event

TAIL_LINES = 20
_TAIL_BYTES = 65_536
_LINE_LENGTH = 500

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "most often the kernel ended it because the host ran out of memory "
    "(see dmesg), or someone ran kill -9",
    signal.SIGSEGV: "a crash in native code; the log has the stack",
    signal.SIGBUS: "often /dev/shm is full or too small, or a mapped file was cut short",
    signal.SIGABRT: "a check in native code failed; the log has its message",
    signal.SIGFPE: "an arithmetic error in native code; the log has the stack",
    signal.SIGILL: "a package was built for another processor",
    signal.SIGTERM: "something outside this launch asked it to end (a scheduler, an operator)",
    signal.SIGXCPU: "a limit on processor time (ulimit -t) was reached",
    signal.SIGXFSZ: "a limit on file size (ulimit -f) was reached",
}

_SCRIPT_HINTS = (
    (
        r"given deepspeed configs in the deepspeed arguments and deepspeed\.initialize",
        "script_config_flag=null keeps trainctl's JSON out of the script's arguments: the script "
        "then trains with its own configuration. To train with the plan's, leave config= out of "
        "deepspeed.initialize()",
    ),
    (
        r"(unrecognized arguments|not used by the HfArgumentParser).*ds_config\.json"
        r"|[Nn]o such option:? '?--deepspeed",
        "script_config_flag=null keeps trainctl's JSON out of the script's arguments, and "
        "script_config_flag=--NAME gives it by the option that the script has for it",
    ),
)
"""Patterns of errors of scripts that cannot take DeepSpeed's JSON, each with a remedy."""

_REPORTED = "error: "
_RANK_PREFIX = re.compile(r"^\[rank\d+\]:( |$)")


def signal_name(number: int) -> str:
    """Return the name of a signal: ``SIGKILL`` for 9, ``signal 70`` if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a log; none if there is no log.

    A line of more than 500 characters is cut and marked.
    """
    try:
        with open_file(path) as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except OSError:
        return []
    return [
        line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]} [cut]"
        for line in text.rstrip().splitlines()[-lines:]
    ]


def error_line(path: Path) -> str:
    """Return the error that a log reports; empty if it reports none.

    It is the line that names the exception of the last traceback, else the last ``error: …`` line
    (how a rank reports what a user can act on).
    """
    # Torch prefixes each line of a traceback with the rank.
    lines = [_RANK_PREFIX.sub("", line) for line in log_tail(path, lines=_TAIL_BYTES)]
    starts = [
        i
        for i, line in enumerate(lines)
        if line.startswith("Traceback (most recent call last)")
        and not (i and lines[i - 1].startswith("Exception ignored"))
    ]
    if not starts:
        reported = [line for line in lines if line.startswith(_REPORTED)]
        return reported[-1].removeprefix(_REPORTED) if reported else ""
    return next((line for line in lines[starts[-1] + 1 :] if re.match(r"\S", line)), "")


def effective_return_code(return_code: int, log: Path) -> int:
    """Return the return code that counts: 1 for a Python error whose process then aborted.

    Threads of communication libraries sometimes abort a process that an exception is already
    ending; the exception is the cause either way.
    """
    return 1 if return_code == -signal.SIGABRT and error_line(log) else return_code


def is_lost_peer(error: str) -> bool:
    """Return True if an error only shows that another rank ended: a consequence, not a cause."""
    return cause_of(1, error).is_consequence


def describe_exit(
    return_code: int,
    log: Path,
    *,
    host_oom_kills: int = 0,
    disk: Cause | None = None,
    uses_trainctl_codes: bool = True,
) -> dict[str, Any]:
    """Return fields of a `failure` record for a process that ended.

    Args:
        return_code: Exit code of the process, or a negative signal number.
        host_oom_kills: Processes that the kernel killed for memory while it ran.
        disk: Fault of the log's disk (`disk_fault`).
        uses_trainctl_codes: Whether exit codes are `ExitCode`; False for a user's program.

    Returns:
        `cause`, `exit_code` (None for a signal), `signal` (None for an exit code), `message` (how
        it ended, as in ``rank 1 was killed by SIGKILL``), `hint`, `log`, `log_tail`.
    """
    error, lines = error_line(log), log_tail(log, lines=_TAIL_BYTES)
    cause = cause_of(
        return_code,
        error,
        lines,
        host_oom_kills=host_oom_kills,
        disk=disk,
        uses_trainctl_codes=uses_trainctl_codes,
    )
    is_signal = return_code < 0
    how = f"was killed by {signal_name(-return_code)}"
    if not is_signal:
        how = f"ended with exit code {return_code}"
    if cause.words:
        how += f" ({cause.words})"
    if error and not is_signal:
        how += f": {error}"
    return {
        "cause": cause.value,
        "exit_code": None if is_signal else return_code,
        "signal": signal_name(-return_code) if is_signal else None,
        "message": how,
        "hint": cause.hint or _SIGNAL_HINTS.get(-return_code, "") or _script_hint(lines),
        "log": str(log),
        "log_tail": _before_stack(lines, TAIL_LINES // 2)[-TAIL_LINES:],
    }


def _before_stack(lines: Sequence[str], frames: int = 0) -> list[str]:
    """Return a log without the stack of a crash in native code and what follows, but some frames.

    Python's faulthandler writes the stack below what the native code said, and below the stack a
    list of modules. Without these, the reason stays within a tail.
    """
    for place, line in enumerate(lines):
        if line.startswith("Fatal Python error:"):
            return [*lines[: place + frames]]
    return [*lines]


def _script_hint(lines: list[str]) -> str:
    """Return a remedy for a script that refuses its arguments; empty if it does not refuse them."""
    text = "\n".join(lines[-TAIL_LINES:])
    return next((hint for pattern, hint in _SCRIPT_HINTS if re.search(pattern, text)), "")


def describe_failure(event: Event) -> str:
    """Return a `failure` record as one sentence: who, where, how.

    The message of a record without a rank (the agent's own) is a whole sentence already.
    """
    if event.get("rank") is None:
        return str(event["message"])
    where = f"node {event['node']}"
    if event.get("host"):
        where += f", {event['host']}"
    if event.get("pid"):
        where += f", process {event['pid']}"
    return f"rank {event['rank']} ({where}) {event['message']}"


def first_failure(events: Iterable[Event], attempt: int) -> Event | None:
    """Return the record of the failure that an attempt reported first; None without one."""
    failures = [
        event for event in events if event["event"] == "failure" and event["attempt"] == attempt
    ]
    # The report of an agent that lost its launcher counts only if there is no other.
    return min(failures, key=lambda event: "launcher_lost" in event, default=None)


class Cause(StrEnum):
    """Kind of death; each calls for another remedy."""

    device_memory = "device_memory"
    host_memory = "host_memory"
    communication_timeout = "communication_timeout"
    lost_peer = "lost_peer"
    collective_mismatch = "collective_mismatch"
    """Ranks called a collective with tensors of different sizes, or different collectives."""
    disk_full = "disk_full"
    read_only = "read_only"
    """The run's file system takes no writes any more, as after an error of its disk."""
    data = "data"
    code = "code"
    killed = "killed"
    hung = "hung"
    lost_node = "lost_node"
    """A machine, or the network path to it, is gone."""
    reported = "reported"
    """Trainctl itself reported the error: the same start would end in the same way."""

    @property
    def words(self) -> str:
        """Phrase for messages; empty where the error is enough."""
        return _WORDS.get(self, "")

    @property
    def hint(self) -> str:
        """Remedy to suggest; empty if there is none."""
        return _CAUSE_HINTS.get(self, "")

    @property
    def is_consequence(self) -> bool:
        """Whether the error only shows that another rank ended or hung."""
        return self in (Cause.lost_peer, Cause.communication_timeout)

    @property
    def is_of_collective(self) -> bool:
        """Whether the ranks' last collectives may explain it."""
        return self.is_consequence or self is Cause.collective_mismatch

    @property
    def is_transient(self) -> bool:
        """Whether a restart may end better."""
        return self not in (Cause.reported, *OF_THE_DISK)


OF_THE_DISK = (Cause.disk_full, Cause.read_only)
"""Causes that keep a run from writing: no process can then record them in its directory."""

_WORDS = {
    Cause.device_memory: "out of memory on the device",
    Cause.host_memory: "out of memory on the host",
    Cause.communication_timeout: "communication timed out",
    Cause.lost_peer: "lost the connection to another rank",
    Cause.collective_mismatch: "ranks called different collectives",
    Cause.disk_full: "disk full",
    Cause.read_only: "file system is read-only",
    Cause.data: "could not read the data",
}

_CAUSE_HINTS = {
    Cause.device_memory: "a smaller training.micro_batch_size, a higher zero_stage, or "
    "activation_checkpointing=full; `trainctl estimate-memory` shows what takes the space",
    Cause.host_memory: "more memory for the job, no offload, or fewer ranks on a host",
    Cause.communication_timeout: "a rank was slow, hung or cut off: the other ranks' logs tell; "
    "launcher.communication_timeout_seconds is the limit",
    Cause.collective_mismatch: "the ranks' code must call the same collectives with tensors of one "
    "size: look for branches and shapes that depend on the rank or its data",
    Cause.disk_full: "free space, then `trainctl resume`; checkpoints that were there are intact",
    Cause.read_only: "look at the disk (dmesg), mount it for writing, then `trainctl resume`; "
    "checkpoints that were there are intact",
    Cause.data: "the traceback in the log names the file",
    Cause.lost_node: "look at the machine and its network; launcher.max_restarts starts again when "
    "it is back, and with launcher.min_nodes also without it",
}

# Checked in this order, before the traceback: a full disk inside the data code is a full disk.
_PATTERNS = [
    (Cause.device_memory, r"(CUDA|HIP|XPU)( error:)? out of memory|OutOfMemoryError|ALLOC_FAILED"),
    (
        Cause.host_memory,
        r"MemoryError|std::bad_alloc|Cannot allocate memory"
        r"|DefaultCPUAllocator: (can't|not enough)",
    ),
    (
        Cause.disk_full,
        r"No space left on device|Disk quota exceeded|File too large|Errno (28|122|27)\b",
    ),
    (Cause.read_only, r"Read-only file system|Errno 30\b"),
    (
        Cause.collective_mismatch,
        r"Received data size doesn't match expected size|mismatch between collectives on ranks",
    ),
    (
        Cause.communication_timeout,
        r"Timed out waiting \d|collective operation timeout|DistStoreError: Timed out"
        r"|wait timeout after",
    ),
    (
        Cause.lost_peer,
        r"connection (was )?(closed|reset|refused)|broken pipe|socket closed"
        r"|remote process exited|DistNetworkError",
    ),
]

_SMALL_FILE_BYTES = 16_384

_DATA_CODE = re.compile(
    r'^  File ".*/trainctl/'
    r'(train/data|data/[\w/]+|readers/\w+|config/text/\w+|engines/micro_batch)\.py", line'
)
_FRAME = re.compile(r'^  File ".*/trainctl/')


def cause_of(
    return_code: int,
    error: str,
    log: Sequence[str] = (),
    *,
    host_oom_kills: int = 0,
    disk: Cause | None = None,
    uses_trainctl_codes: bool = True,
) -> Cause:
    """Return the cause of a death.

    Args:
        return_code: Exit code of the process, or a negative signal number, as in `subprocess`.
        error: The line of the log that names the error, if there is one.
        log: Last lines of the log: the traceback, or the output of native code before it aborted.
        host_oom_kills: Processes that the kernel killed for memory while this one ran.
        disk: Fault of the log's disk (`disk_fault`); the log may then lack the error.
        uses_trainctl_codes: Whether exit codes are `ExitCode`; False for a user's program.
    """
    if -return_code == 9:
        return Cause.host_memory if host_oom_kills else Cause.killed
    # Search the rest of the log only if native code died without an error line.
    text = error or ("\n".join(_before_stack(log)[-5:]) if return_code < 0 else "")
    for cause, pattern in _PATTERNS:
        if re.search(pattern, text, re.IGNORECASE):
            return cause
    if disk is not None and not error and return_code > 0:
        return disk
    if uses_trainctl_codes and return_code in _REPORTED_CODES:
        return Cause.reported
    if return_code < 0:
        return Cause.killed
    frames = [line for line in log if _FRAME.match(line)]
    return Cause.data if frames and _DATA_CODE.match(frames[-1]) else Cause.code


_REPORTED_CODES = frozenset(
    {
        ExitCode.bad_input,
        ExitCode.does_not_fit,
        ExitCode.environment,
        ExitCode.run_state,
        ExitCode.training_failed,
    }
)


def exit_code(
    return_code: int, cause: Cause = Cause.code, *, uses_trainctl_codes: bool = True
) -> int:
    """Return the exit code of a launch whose rank ended this way.

    It is 128 + n for signal n, a rank's own exit code if that is one of `ExitCode`, and else the
    code of a failed training. A full disk counts as a failure of the machine, however it showed.
    """
    if cause in OF_THE_DISK:
        return int(ExitCode.environment)
    if return_code < 0:
        return 128 - return_code
    is_reported = uses_trainctl_codes and return_code in _REPORTED_CODES
    return return_code if is_reported else int(ExitCode.training_failed)


def disk_fault(folder: Path) -> Cause | None:
    """Return why no small file can be written to a folder's disk; None if it can, or is unknown."""
    try:
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(_SMALL_FILE_BYTES))
    except OSError as error:
        return cause_of_disk(error)
    return None


def cause_of_disk(error: OSError) -> Cause | None:
    """Return the fault of a disk that an error tells of: no room (or quota), or no writes."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Cause.disk_full
    return Cause.read_only if error.errno == errno.EROFS else None


def host_oom_kills(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of processes killed for memory by the kernel in this process's cgroup.

    Counts the whole machine where the cgroup cannot be read; 0 where nothing can. The difference of
    two calls gives the kills in between.
    """
    for counter, name in (*_group_counters(proc, cgroups), (proc / "vmstat", "oom_kill")):
        try:
            lines = counter.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == name and value.isdigit():
                return int(value)
    return 0


def _group_counters(proc: Path, cgroups: Path) -> list[tuple[Path, str]]:
    """Return the files that count kills in this process's memory cgroup, versions 2 and 1."""
    try:
        groups = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found.append((cgroups / path.lstrip("/") / "memory.events", "oom_kill"))
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            # In a container the cgroup's own path may not be visible, only its root.
            for folder in (root / path.lstrip("/"), root):
                found.append((folder / "memory.oom_control", "oom_kill"))
    return found
