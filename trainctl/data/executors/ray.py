"""The executor `ray`: tasks of a Ray cluster, which repeats those of workers that die."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainctl.data.executors import Done, ExecutorTask, ignore_done, lost_tasks
from trainctl.errors import MachineError, describe_exception
from trainctl.readers.remote import import_optional, print_notice

_RETRIES = 8
"""Deaths of workers and nodes that one task outlives. Errors of a task itself are not retried."""
_CONNECT_SECONDS = 10
_AHEAD = 2
"""Tasks given to Ray per CPU of the cluster: the next one waits where the last one ends."""


@dataclass(frozen=True, slots=True)
class RayExecutor:
    """Executor of a Ray cluster, which this process joins as a driver."""

    address: str
    """Address for `ray.init`: auto, HOST:PORT or ray://HOST:PORT."""
    workers: int | None = None
    """Tasks at a time; None gives each CPU of the cluster one, and one that waits."""
    is_shared: bool = True

    def run(self, tasks: Sequence[ExecutorTask], done: Done = ignore_done) -> None:
        """Run all tasks, each on one CPU of the cluster."""
        if not tasks:
            return
        ray, is_ours = _connect(self.address)
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES)(_call_in)
        folder = str(Path.cwd())
        lost = f"the Ray cluster at data.executor_address={self.address} was lost"
        waiting = iter(tasks)
        running: dict[Any, ExecutorTask] = {}
        try:
            with _convert_errors(lost):
                notify_if_no_cpu_is_free(ray)
            while True:
                with _convert_errors(lost):
                    cpus = int(ray.cluster_resources().get("CPU", 0))
                    count = self.workers or _AHEAD * max(1, cpus)
                    for task in islice(waiting, max(0, count - len(running))):
                        running[remote.options(name=task.name).remote(folder, task.call)] = task
                    if not running:
                        return
                    (ready, *_), _ = ray.wait(list(running), num_returns=1)
                task = running.pop(ready)
                try:
                    ray.get(ready)
                except Exception as error:
                    raise _as_trainctl_error(task, error) from None
                done(task)
        finally:
            with suppress(Exception):  # the connection may be lost
                for other in running:  # an error, or an interruption
                    ray.cancel(other, force=True)
            if is_ours:  # Ray ends its drivers when the cluster stops, such as a node's agent
                ray.shutdown()

    def __str__(self) -> str:
        return f"executor ray (cluster {self.address})"


def notify_if_no_cpu_is_free(ray: Any) -> None:
    """Print a notice if no CPU is free: there is none, or placement groups (of runs) hold all."""
    cpus, groups = ray.cluster_resources().get("CPU", 0), ray.util.placement_group_table().values()
    bundles = (each["bundles"].values() for each in groups if each["state"] == "CREATED")
    held = sum(bundle.get("CPU", 0) for some in bundles for bundle in some)
    if cpus - held < 1:
        why = (
            f"placement groups hold all {cpus:g} CPUs of the cluster; a lower "
            "launcher.cpus_per_node leaves some free"
            if held
            else f"the cluster has {cpus:g} CPUs, and a task takes 1"
        )
        print_notice(f"no task can start: {why}")


def _require_listener(address: str) -> None:
    """Raise an OSError if nothing listens at an address: Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _call_in(folder: str, call: Any) -> None:
    """Make a call in the driver's folder, from which a user's functions are imported."""
    if Path(folder).is_dir():
        os.chdir(folder)
    call()


def _as_trainctl_error(task: ExecutorTask, error: Exception) -> Exception:
    """Return what a task raised on its node; or an error that says how its worker ended."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        if "failed to import on the worker" in str(error.cause):
            return lost_tasks(
                [task.name],
                f"could not import trainctl: {str(error.cause).strip().splitlines()[-1]}",
                "install the same trainctl, with its packages, on every node of the cluster",
            )
        return error.cause if isinstance(error.cause, Exception) else error
    first = str(error).strip().partition("\n")[0]
    return lost_tasks(
        [task.name],
        f"ended {_RETRIES + 1} times: {type(error).__name__}: {first}",
        "see Ray's logs of its node; start again: what is finished is kept",
    )


def _connect(address: str) -> tuple[Any, bool]:
    """Return Ray, connected to the cluster, and whether the connection is new.

    Raises:
        TrainctlError: Ray is not installed, no cluster answers, or the user's program is connected
            to another one (exit code 4).
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = import_optional("ray", "data.executor=ray")
    if ray.is_initialized():
        _require_connection_to(address, ray.get_runtime_context().gcs_address)
        return ray, False
    variables = {name: value for name, value in os.environ.items() if name.startswith("TRAINCTL_")}
    variables |= {"PYTHONSAFEPATH": "1", "RAYON_NUM_THREADS": "1"}  # a task has one CPU
    with _convert_errors(f"no Ray cluster at data.executor_address={address}"):
        _require_listener(address)
        ray.init(
            address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
        )
    return ray, True


@contextmanager
def _convert_errors(problem: str) -> Iterator[None]:
    """Report errors of a connection within the context as a TrainctlError (exit code 4)."""
    from ray.exceptions import RayError

    try:
        yield
    except (RayError, RuntimeError, ValueError, OSError) as error:
        raise MachineError(
            f"{problem}: {' '.join(describe_exception(error).split())}",
            hint="ray start --head on one machine, and ray start --address=HOST:6379 on the others",
        ) from None


def _require_connection_to(address: str, connected: str) -> None:
    """Refuse the connection of the user's program if it is to another cluster than `address`."""
    if address == "auto" or address.startswith("ray://"):
        return
    (host, _, port), (own, _, own_port) = address.rpartition(":"), connected.rpartition(":")
    with suppress(OSError):
        host, own = socket.gethostbyname(host), socket.gethostbyname(own)
    if (host, port) != (own, own_port):
        raise MachineError(
            f"this process is connected to the Ray cluster {connected}, and "
            f"data.executor_address={address} is another one",
            hint="ray.shutdown() first, or data.executor_address=auto",
        )
