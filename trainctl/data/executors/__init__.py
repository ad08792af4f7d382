"""Executors: where the tasks of a preparation run, in processes here, on Ray, or as a Slurm array.

A task is a name and a call without arguments. Tasks are independent and idempotent: each publishes
its result in the cache by an atomic rename, and does nothing if the result is there. So an executor
may run a task twice, on any machine and in any order, and the bytes are the same. Whoever plans the
tasks leaves the finished ones out, and an executor returns nothing but the end of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainctl.config.schema import DataExecutor, RunConfig
from trainctl.errors import MachineError, TrainctlError


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
    from trainctl.data.executors.local import LocalExecutor

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
