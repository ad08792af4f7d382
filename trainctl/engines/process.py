"""One rank among the others: process groups, device, and collectives on plain numbers."""

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
    """This rank."""

    rank: int
    """Its number in the world."""
    world_size: int
    """Ranks of the run."""
    device: torch.device
    """Device of this rank's tensors."""
    control: dist.ProcessGroup
    """A gloo group of all ranks for decisions and small host data, so that these never wait behind,
    or need memory on, the device."""
    timeout: timedelta
    """Limit of a collective."""

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Return each value summed over all ranks, in double precision."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.control)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank: the same answer on all."""
        return self.sum(float(flag))[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """Return a small value of each rank, by rank: the same list on all."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Return the first rank's value, on all ranks."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.control)
        return values[0]

    def barrier(self) -> None:
        # `dist.barrier` would make a tensor on the device that NCCL's groups are bound to.
        self.sum(0.0)

    def apart(self) -> Process:
        """Return the same rank with a control group of its own, for another thread; on all
        ranks."""
        return replace(self, control=dist.new_group(backend="gloo", timeout=self.timeout))


def meeting_place() -> dict[str, Any]:
    """Arguments that initialise process groups where ranks meet in a file (`agent.rendezvous`).

    None where they meet by the environment. By a scheme of our own: torch's `file://` takes no path
    with a `?` or `#` in it.
    """
    if STORE_VARIABLE not in os.environ:
        return {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def meet(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.FileStore(os.environ[STORE_VARIABLE], world_size), rank, world_size

    dist.register_rendezvous_handler("trainctl", meet)
    return {"init_method": "trainctl://", "rank": rank, "world_size": world_size}


def compute_deterministically() -> None:
    """Let torch take only algorithms that give the same bits each time, or raise where it has none.

    What has to be in the environment before CUDA starts, launchers set (`plan.deterministic`).
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # times algorithms, and takes what was fastest today
    # Else torch fills each buffer that nothing has been written to yet: time, and no other numbers.
    torch.utils.deterministic.fill_uninitialized_memory = False


def not_deterministic(error: RuntimeError) -> TrainctlError | None:
    """What to say of an operation that torch has no deterministic algorithm for.

    None if the error is about something else, or nobody asked for such algorithms.
    """
    message = str(error)
    if "use_deterministic_algorithms" not in message:
        return None
    return TrainctlError(
        f"training.deterministic=true: {message.partition(', but you set')[0]}",
        hint="other kernels (kernels.*, model.attention), or training.deterministic=false",
    )


def stop_process() -> None:
    """Leave the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
