"""This rank in the world: process groups, device, and collectives on plain numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainctl.errors import TrainctlError
from trainctl.runs.processes import STORE_VARIABLE


@dataclass(frozen=True, slots=True)
class Process:
    """This rank: its number, device and control group."""

    rank: int
    """Global rank."""
    world_size: int
    device: torch.device
    control: dist.ProcessGroup
    """A gloo group of all ranks for decisions and small host data, so that these never wait behind
    device work or need device memory.
    """
    timeout: timedelta
    """Time limit of a collective."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Return True, on all ranks, if the flag is set on at least one."""
        return self.sum(float(flag))[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on all ranks; for small values."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def broadcast_from_first(self, value: Any) -> Any:
        """Return the first rank's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        # `dist.barrier` would allocate a tensor on the device that NCCL's groups are bound to.
        self.sum(0.0)

    def with_own_group(self) -> Process:
        """Return the same rank with another control group, for another thread; on all ranks
        together.
        """
        return replace(self, control=dist.new_group(backend="gloo", timeout=self.timeout))


def rendezvous_arguments() -> dict[str, Any]:
    """Return arguments that initialise process groups through a file (`launch.agent.rendezvous`).

    Empty if the ranks meet through the environment. The scheme is trainctl's own: torch's `file://`
    takes no path with a `?` or `#` in it.
    """
    if STORE_VARIABLE not in os.environ:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def meet(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.FileStore(os.environ[STORE_VARIABLE], world_size), rank, world_size

    dist.register_rendezvous_handler("trainctl", meet)
    return {"init_method": "trainctl://", "rank": rank, "world_size": world_size}


def compute_deterministically() -> None:
    """Restrict torch to algorithms that give the same bits each time; it raises where it has none.

    The environment variables that must be set before CUDA starts are set by launchers
    (`plan.deterministic`).
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # it would time algorithms and take the fastest
    # Else torch fills each uninitialized buffer, which takes time and changes no results.
    torch.utils.deterministic.fill_uninitialized_memory = False


def not_deterministic(error: RuntimeError) -> TrainctlError | None:
    """Return the error to report for an operation without a deterministic algorithm in torch.

    None if the error is about something else, or the run does not require such algorithms.
    """
    message = str(error)
    if "use_deterministic_algorithms" not in message:
        return None
    return TrainctlError(
        f"training.deterministic=true: {message.partition(', but you set')[0]}",
        hint="other kernels (kernels.*, model.attention), or training.deterministic=false",
    )


def stop_process() -> None:
    """Destroy the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
