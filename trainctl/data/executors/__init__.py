"""Executors: where the tasks of a preparation run, in processes here, on Ray, or as a Slurm array.

A task is a name and a call without arguments. Tasks are independent and idempotent: each publishes
its result in the cache by an atomic rename, and does nothing if the result is there. So an executor
may run a task twice, on any machine and in any order, and the bytes are the same. Whoever plans the
tasks leaves the finished ones out, and an executor returns nothing but the end of all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Protocol

from trainctl.config.schema import DataExecutor, RunConfig
from trainctl.errors import MachineError, TrainctlError
from trainctl.runs.processes import available_cores, die_with_parent


@dataclass(frozen=True, slots=True)
class ExecutorTask:
    """A call that any process may make."""

    name: str
    """Unique among the tasks of a step; messages about failures have it."""
    call: Callable[[], object]
    """Picklable; what it returns is ignored."""
    size: int = 0
    """Approximate bytes to work on, which decide how many processes are worth their start."""


Done = Callable[[ExecutorTask], None]


def ignore_done(task: ExecutorTask) -> None:
    """Ignore the end of a task."""


class Executor(Protocol):
    """Runner of tasks."""

    @property
    def is_shared(self) -> bool:
        """Whether tasks run on other machines, which see the cache under the same path."""

    def run(self, tasks: Sequence[ExecutorTask], done: Done = ignore_done) -> None:
        """Run all tasks, and call `done` in this process after each.

        Raises:
            TrainctlError: What a task raised; or a process, node or job ended before its tasks
                (exit code 4). Results of finished tasks are kept.
        """

    def __str__(self) -> str:
        """Describe what is in force, for the output of a command."""


def executor_of(config: RunConfig, workers: int | None = None) -> Executor:
    """Return the executor of a configuration.

    Args:
        workers: Processes, tasks at a time on Ray, or jobs of the array; None is the executor's
            default.
    """
    kind = config.data.executor
    if kind is DataExecutor.ray:
        from trainctl.data.executors.ray import RayExecutor

        return RayExecutor(config.data.executor_address, workers)
    if kind is DataExecutor.slurm:
        from trainctl.data.executors.slurm import SlurmExecutor

        return SlurmExecutor.of(config, workers)

    return LocalExecutor(workers)


def lost_tasks(names: Sequence[str], how: str, hint: str) -> TrainctlError:
    """Return the error of tasks whose process ended before them.

    `how` is the end of the process, as a clause that follows "the process of TASK".
    """
    some = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
    return MachineError(f"the process of {some} {how}", hint=hint)


PATIENCE_SECONDS = 70.0
"""Longest time for another machine's file to appear here: NFS caches missing names for 60 s."""
_POLL_SECONDS = 1.0


def require_results(
    executor: Executor, names: Sequence[str], is_there: Callable[[str], bool], folder: object
) -> None:
    """Wait until this machine sees the results that an executor's machines wrote to a folder.

    Raises:
        TrainctlError: Tasks are finished, and the result of one is not there (exit code 4).
    """
    if not executor.is_shared:
        return
    names = [name for name in names if not is_there(name)]  # of many, this takes its time
    until = time.monotonic() + PATIENCE_SECONDS
    while names := [name for name in names if not is_there(name)]:
        if time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            continue
        raise MachineError(
            f"{executor} has finished {names[0]}, and {folder} does not have its result",
            hint="name a folder that all machines share in TRAINCTL_CACHE_DIR",
        )


_WORTH_A_PROCESS = 8 << 20
"""Bytes of work per additional process: starting one takes as long as tokenizing some of them."""


@dataclass(frozen=True, slots=True)
class LocalExecutor:
    """Executor of this machine."""

    workers: int | None = None
    """Processes; None starts as many as are worth it, up to one per core."""
    is_shared: bool = False

    def process_count(self, sizes: Sequence[int]) -> int:
        """Return the number of processes for tasks of these sizes; 1 is this process."""
        if self.workers is not None:
            return max(1, min(self.workers, len(sizes)))
        return max(1, min(available_cores(), len(sizes), sum(sizes) // _WORTH_A_PROCESS))

    def run(self, tasks: Sequence[ExecutorTask], done: Done = ignore_done) -> None:
        """Run all tasks. Processes die with this one, even if it is killed."""
        count = self.process_count([task.size for task in tasks])
        if count == 1:
            for task in tasks:
                task.call()
                done(task)
            return
        with _safe_path():
            self._run_in_pool(count, tasks, done)

    def _run_in_pool(self, count: int, tasks: Sequence[ExecutorTask], done: Done) -> None:
        before = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(
            count,
            get_context("spawn"),
            initializer=_start_worker,
            initargs=(os.getpid(), max(1, available_cores() // count)),
        )
        left = {task.name for task in tasks}
        try:
            started = {pool.submit(task.call): task for task in tasks}
            for future in as_completed(started):
                future.result()
                task = started.pop(future)
                left.discard(task.name)
                done(task)
        except BrokenProcessPool:
            raise MachineError(
                f"a process that prepares text was killed, with {len(left):,} of {len(tasks):,} "
                "tasks left",
                hint="start again: what is finished is kept; fewer processes need less memory",
            ) from None
        finally:
            if left:  # an error, or an interruption: nobody waits for a long task
                for process in set(multiprocessing.active_children()) - before:
                    process.kill()
            pool.shutdown(cancel_futures=True)

    def __str__(self) -> str:
        count = available_cores() if self.workers is None else self.workers
        return f"executor local ({count} process{'es' if count > 1 else ''})"


LOCAL = LocalExecutor()
INLINE = LocalExecutor(1)
"""Executor that runs all tasks in this process."""


def _start_worker(parent: int, threads: int) -> None:
    """Prepare a new process; `threads` are for the tokenizers library."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    die_with_parent(parent)
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keep the pool's processes, which begin with `-c`, from importing from the current folder."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before
