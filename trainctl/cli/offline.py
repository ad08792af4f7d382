"""The subprocess with torch in which `export`, `sample` and `evaluate` do their work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainctl.cli.console import say
from trainctl.cli.meter import Meter
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.processes import PARENT_VARIABLE


def require_new(out: Path) -> None:
    """Refuse an output path that exists, unless it is an empty folder; called before the work.

    Raises:
        TrainctlError: The path is a file, or a folder that is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise TrainctlError(
            f"{out} exists and is not an empty folder", hint="name another, or remove it"
        )


def run_offline(task: str, arguments: Sequence[str | Path], meter: Meter) -> dict[str, Any]:
    """Run a task of `trainctl.train.offline` in a process of its own and return its result.

    Raises:
        TrainctlError: The task failed with a message, or the process was killed (exit code 4).
        RuntimeError: The process ended without an answer, by a bug; its traceback is printed.
    """
    command = [sys.executable, "-P", "-m", "trainctl.train.offline", task, *map(str, arguments)]
    result: dict[str, Any] | None = None
    with (
        tempfile.TemporaryFile() as talk,
        # In a session of its own: Ctrl-C reaches only this process, which then ends that one.
        subprocess.Popen(
            command,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=talk,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                answer = json.loads(line)
                if "progress" in answer:
                    meter(*answer["progress"])
                elif "error" in answer:
                    raise _error(answer["error"])
                else:
                    result = answer["result"]
            code = process.wait()
        except BaseException:
            process.terminate()
            raise
        if result is None:
            talk.seek(0)
            raise _failure(task, code, talk.read().decode(errors="replace"))
    return result


def _error(problem: dict[str, Any]) -> TrainctlError:
    code = ExitCode(problem["exit_code"])
    return TrainctlError(problem["message"], hint=problem["hint"], exit_code=code)


def _failure(task: str, code: int, talk: str) -> Exception:
    """Return the error of a process that ended without a result: it was killed, or has a bug."""
    if code < 0:
        name = signal.Signals(-code).name
        hint = "the memory of this machine may not suffice" if name == "SIGKILL" else ""
        return TrainctlError(
            f"the process that was to {task} was ended by {name}",
            hint=hint,
            exit_code=ExitCode.environment,
        )
    say(talk.rstrip())
    return RuntimeError(f"the process that was to {task} failed with the traceback above")
