"""Description of a process that died: how it ended, what its log says, what may help."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainctl.config.reading import open_file
from trainctl.runs.causes import cause_of
from trainctl.runs.records import Event

TAIL_LINES = 20
_TAIL_BYTES = 65_536
_LINE_LENGTH = 500

_HINTS: dict[int, str] = {
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


def describe(
    return_code: int,
    log: Path,
    *,
    host_oom_kills: int = 0,
    disk_is_full: bool = False,
    uses_trainctl_codes: bool = True,
) -> dict[str, Any]:
    """Return fields of a `failure` record for a process that ended.

    Args:
        return_code: Exit code of the process, or a negative signal number.
        host_oom_kills: Processes that the kernel killed for memory while it ran.
        disk_is_full: Whether the log's disk is full.
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
        disk_is_full=disk_is_full,
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
        "hint": cause.hint or _HINTS.get(-return_code, "") or _script_hint(lines),
        "log": str(log),
        "log_tail": lines[-TAIL_LINES:],
    }


def _script_hint(lines: list[str]) -> str:
    """Return a remedy for a script that refuses its arguments; empty if it does not refuse them."""
    text = "\n".join(lines[-TAIL_LINES:])
    return next((hint for pattern, hint in _SCRIPT_HINTS if re.search(pattern, text)), "")


def sentence(event: Event) -> str:
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
