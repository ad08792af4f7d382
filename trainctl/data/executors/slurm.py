"""The executor `slurm`: an array job over a shared file system, which this process waits for.

    slurm-NAME/N.calls     the pickled calls of array task N
    slurm-NAME/calls.json  SHA-256 of each of these files
    slurm-NAME/N.done      a line for each finished call: its number
    slurm-NAME/N.json      the end of array task N: its exit code, and the error of a call
    slurm-NAME/N.log       its output

A pickle runs code when it is read, and others may write to a shared folder. So the job's command
line, which Slurm keeps, has the checksum of `calls.json`, and an array task loads only the bytes
that were submitted.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from trainctl.config.schema import RunConfig
from trainctl.data.cache_files import cache_folder, convert_write_errors
from trainctl.data.executors import (
    PATIENCE_SECONDS,
    Done,
    ExecutorTask,
    ignore_done,
    lost_tasks,
)
from trainctl.errors import ExitCode, RunStateError, TrainctlError, describe_exception
from trainctl.options.launcher.slurm import SlurmConfig, shared_options
from trainctl.readers.remote import print_notice
from trainctl.runs.files import write_json
from trainctl.runs.processes import run_tool

_CALLS = "calls.json"
_TASKS = 100
"""Array tasks by default; a cluster's MaxArraySize is 1,001 unless configured."""
_POLL_SECONDS = 1.0
_LOOKS_A_QUERY = 15
"""Looks at the folder between two at Slurm, whose controller serves all users."""


@dataclass(frozen=True, slots=True)
class SlurmExecutor:
    """Executor of array jobs, one array for each step of a preparation."""

    options: tuple[str, ...] = ()
    """Options of sbatch, those of the user last."""
    workers: int | None = None
    """Tasks of the array; None makes up to 100."""
    is_shared: bool = True

    @classmethod
    def of(cls, config: RunConfig, workers: int | None) -> SlurmExecutor:
        """Return the executor with the options of `launcher=slurm`, if that is the launcher."""
        options: list[str] = []
        section = config.launcher
        if isinstance(section, SlurmConfig):
            shared = shared_options(section).items()
            options = [f"--{name}={value}" for name, value in shared if value is not None]
        return cls((*options, *config.data.executor_options), workers)

    def run(self, tasks: Sequence[ExecutorTask], done: Done = ignore_done) -> None:
        """Run all tasks in one array job. The job is cancelled if this process is interrupted.

        Its folder stays after an error whose hint names a log.
        """
        if not tasks:
            return
        folder = cache_folder() / f"slurm-{secrets.token_hex(6)}"
        hint = ""
        count = min(len(tasks), self.workers or _TASKS)
        shares = [tasks[number::count] for number in range(count)]
        try:
            with convert_write_errors(folder):
                digest = _write_calls(folder, shares)
            _Array(self._submit(folder, count, digest), folder, shares, done).wait()
        except BaseException as error:
            hint = getattr(error, "hint", "")
            # By name: without an answer of sbatch there may be a job all the same.
            with suppress(TrainctlError):
                run_tool(("scancel", f"--name={_job_name(folder)}"))
            raise
        finally:
            if str(folder) not in hint:
                shutil.rmtree(folder, ignore_errors=True)

    def _submit(self, folder: Path, count: int, digest: str) -> str:
        script = folder / "job.sh"
        threads = 'export RAYON_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"'
        script.write_text(f'#!/bin/bash\n{threads}\nexec "$@"\n')
        command = (
            "sbatch",
            "--parsable",
            f"--job-name={_job_name(folder)}",
            f"--array=0-{count - 1}",
            *("--nodes=1", "--ntasks=1", "--requeue", "--export=ALL", "--open-mode=append"),
            f"--output={str(folder).replace('%', '%%')}/%a.log",
            *self.options,
            *(str(script), sys.executable, "-P", "-m", "trainctl.data", str(folder), digest),
        )
        return run_tool(command).strip().partition(";")[0]

    def __str__(self) -> str:
        options = " ".join(self.options)
        most = self.workers or _TASKS
        return f"executor slurm (arrays of up to {most} tasks{options and ': ' + options})"


def _job_name(folder: Path) -> str:
    return f"trainctl-data-{folder.name}"


def _write_calls(folder: Path, shares: Sequence[Sequence[ExecutorTask]]) -> str:
    """Write the calls of each array task, and return the checksum of their checksums."""
    folder.mkdir(parents=True)
    digests = []
    for number, share in enumerate(shares):
        raw = pickle.dumps([task.call for task in share])
        (folder / f"{number}.calls").write_bytes(raw)
        digests.append(sha256(raw).hexdigest())
    listed = json.dumps(digests).encode()
    (folder / _CALLS).write_bytes(listed)
    return sha256(listed).hexdigest()


class _Array:
    """An array job, as its folder and Slurm show it."""

    def __init__(
        self, job: str, folder: Path, shares: Sequence[Sequence[ExecutorTask]], done: Done
    ) -> None:
        self._job, self._folder, self._shares, self._done = job, folder, shares, done
        self._finished: list[set[int]] = [set() for _ in shares]
        self._is_stuck = False

    def wait(self) -> None:
        """Wait for the end of all array tasks.

        Raises:
            TrainctlError: The first error of a call; or array tasks ended without an end of theirs,
                with the names of their calls (exit code 4).
        """
        gone = None
        looks = itertools.count()
        while False in [self._is_ended(number) for number in range(len(self._shares))]:
            if (gone is None and next(looks) % _LOOKS_A_QUERY) or self._is_alive():
                gone = None
            elif gone is None:
                gone = time.monotonic()
            elif time.monotonic() - gone > PATIENCE_SECONDS:
                self._refuse_lost()
            time.sleep(_POLL_SECONDS)

    def _is_alive(self) -> bool:
        """Return True if Slurm has array tasks that wait or run, or does not answer."""
        try:
            shown = run_tool(("squeue", "--noheader", f"--jobs={self._job}", "--format=%T %r"))
        except TrainctlError as error:
            # Slurm forgets a job some minutes after its end (MinJobAge).
            return "Invalid job id" not in error.message
        stuck = re.search(r" (.*(?:[Hh]eld|Never).*)", shown)
        if stuck and not self._is_stuck:
            print_notice(
                f"the array job {self._job} does not start by itself: {stuck[1]} "
                f"(scontrol show job {self._job})"
            )
        self._is_stuck = stuck is not None
        return bool(shown.strip())

    def _is_ended(self, number: int) -> bool:
        """Report new finished calls of an array task, and return True if it has ended.

        Raises:
            TrainctlError: The error of a call.
        """
        end = self._folder / f"{number}.json"
        is_ended = end.is_file()
        with suppress(FileNotFoundError):
            lines = (self._folder / f"{number}.done").read_text().split("\n")[:-1]
            for place in sorted(set(map(int, lines)) - self._finished[number]):
                self._finished[number].add(place)
                self._done(self._shares[number][place])
        if is_ended:
            answer = json.loads(end.read_bytes())
            if code := ExitCode(answer["exit_code"]):
                raise TrainctlError(answer["message"], hint=answer["hint"], exit_code=code)
        return is_ended

    def _refuse_lost(self) -> None:
        count = len(self._shares)
        numbers = [n for n in range(count) if not (self._folder / f"{n}.json").is_file()]
        if not numbers:
            return  # the last one has appeared just now
        names = [
            task.name
            for number in numbers
            for place, task in enumerate(self._shares[number])
            if place not in self._finished[number]
        ]
        tasks = ",".join(map(str, numbers))
        raise lost_tasks(
            names,
            f"ended with the tasks {tasks} of the array job {self._job}",
            f"see {self._folder}/{numbers[0]}.log, and Slurm's record of the job; "
            "start again: what is finished is kept",
        )


def run_array_task(folder: Path, digest: str) -> int:
    """Make the calls of this process's array task, and return its exit code."""
    number = int(os.environ["SLURM_ARRAY_TASK_ID"])
    code, answer = ExitCode.success, {}
    try:
        for place, call in enumerate(_read_calls(folder, digest, number)):
            call()
            with (folder / f"{number}.done").open("a") as stream:
                stream.write(f"{place}\n")
    except TrainctlError as error:
        code, answer = error.exit_code, {"message": error.message, "hint": error.hint}
    except Exception as error:
        import traceback

        traceback.print_exc()
        code = ExitCode.internal_error
        answer = {"message": describe_exception(error), "hint": f"see {folder}/{number}.log"}
    write_json(folder / f"{number}.json", {**answer, "exit_code": int(code)})
    return code


def _read_calls(folder: Path, digest: str, number: int) -> list[Callable[[], object]]:
    """Return the calls of an array task.

    Raises:
        TrainctlError: The files are not those that were submitted (exit code 5).
    """
    listed, raw = (folder / _CALLS).read_bytes(), (folder / f"{number}.calls").read_bytes()
    if (
        sha256(listed).hexdigest() != digest
        or sha256(raw).hexdigest() != json.loads(listed)[number]
    ):
        raise RunStateError(f"{folder} has other calls than were submitted")
    calls: list[Callable[[], object]] = pickle.loads(raw)
    return calls
