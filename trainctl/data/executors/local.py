"""The executor `local`: processes of this machine, or this process if others are not worth it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from trainctl.data.executors import Done, ExecutorTask, ignore_done
from trainctl.errors import MachineError
from trainctl.runs.processes import available_cores, die_with_parent

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
