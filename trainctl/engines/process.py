"""This rank: its device, its position on the mesh, process groups, collectives on plain numbers.

Processors without instructions for bf16 and fp16 have a matrix product here: torch has no library
to call there and multiplies element by element, which takes ten to forty times as long as fp32
(`gemm` in aten/src/ATen/native/CPUBlas.cpp). The factors are widened to fp32, the fp32 library
multiplies them, and the result is rounded once. Processors with such instructions also add exact
products in fp32, so results differ only in the order of a sum.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trainctl.config.schema import PrecisionConfig
from trainctl.engines.micro_batch import SequencePart
from trainctl.errors import TrainctlError
from trainctl.hardware.devices import lacking_formats
from trainctl.options.precision import precision_of
from trainctl.plans.types import Mesh, RunPlan
from trainctl.runs.processes import STORE_VARIABLE

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS: tuple[Callable[..., torch.Tensor], ...] = (
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
)
"""All other matrix products of a model are composed of these."""


def use_fp32_cpu_products(section: PrecisionConfig, device: torch.device) -> None:
    """Widen the factors in this process if the CPU lacks instructions for the compute format.

    Args:
        device: Device of the model; nothing changes unless it is the CPU.
    """
    narrow = precision_of(section).format.value
    if device.type == "cpu" and narrow in lacking_formats():
        widen_format(_NARROW[narrow])


@cache
def widen_format(format: torch.dtype) -> torch.library.Library:
    """Replace torch's CPU kernels of matrix products for factors of one format only.

    Returns:
        The library that owns the kernels; the cache keeps it, so they stay for the whole process.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about replacing a kernel
        for product in _PRODUCTS:
            library.impl(product.__name__, _widening_kernel(product, format), "CPU")
    return library


def _widening_kernel(
    product: Callable[..., torch.Tensor], format: torch.dtype
) -> Callable[..., Any]:
    def kernel(*factors: torch.Tensor, **scales: float) -> torch.Tensor:
        left, right = factors[-2:]
        if all(factor.dtype is format for factor in factors):
            return product(*(factor.float() for factor in factors), **scales).to(format)
        # torch's own kernel: the overload with `out` has a kernel that was not replaced.
        out = right.new_empty(*left.shape[:-1], right.shape[-1])
        return product(*factors, **scales, out=out)

    return kernel


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

    def sum(self, *values: float, within: timedelta | None = None) -> list[float]:
        """Return each value summed over all ranks, in double precision.

        Args:
            within: Time limit, after which the process group is broken; None is `timeout`.

        Raises:
            RuntimeError: A rank has not come in time, or is gone.
        """
        tensor = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(tensor, group=self.control, async_op=within is not None)
        if work is not None and within is not None:
            work.wait(within)
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
        group = dist.new_group(backend="gloo", timeout=self.timeout, group_desc="control")
        return replace(self, control=group)


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


def start_process(plan: RunPlan, device: torch.device, join: Callable[..., None]) -> Process:
    """Return this rank, once the ranks that the agent started have joined each other.

    Args:
        join: `init_process_group`, as torch or DeepSpeed has it.
    """
    if plan.config.training.deterministic:
        compute_deterministically()
    use_fp32_cpu_products(plan.config.precision, device)
    timeout = timedelta(seconds=plan.config.launcher.communication_timeout_seconds)
    backend = "gloo" if device.type == "cpu" else "nccl"
    join(backend, timeout=timeout, **rendezvous_arguments())
    return joined_process(device, timeout)


def joined_process(device: torch.device, timeout: timedelta) -> Process:
    """Return this rank, once the ranks have joined each other; on all ranks together."""
    return Process(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        device=device,
        control=dist.new_group(backend="gloo", timeout=timeout, group_desc="control"),
        timeout=timeout,
    )


def compute_deterministically() -> None:
    """Restrict torch to algorithms that give the same bits each time; it raises where it has none.

    The environment variables that must be set before CUDA starts are set by launchers
    (`plan.deterministic`).
    """
    torch.use_deterministic_algorithms(True)
    # Otherwise cuDNN would time algorithms and take the fastest.
    torch.backends.cudnn.benchmark = False
    # Otherwise torch fills each uninitialized buffer, which takes time and changes no results.
    torch.utils.deterministic.fill_uninitialized_memory = False


def nondeterminism_error(error: RuntimeError) -> TrainctlError | None:
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


@dataclass(frozen=True, slots=True)
class Axis:
    """The ranks that differ from this one in one coordinate (or two) only."""

    index: int
    """Position of this rank in `ranks`."""
    ranks: tuple[int, ...]
    """Global ranks, in order."""
    group: dist.ProcessGroup
    is_folded: bool = False
    """Whether the last pipeline stage is on the first rank too."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == (0 if self.is_folded else self.size - 1)


@dataclass(frozen=True, slots=True)
class ProcessMesh:
    """Position of this rank on each axis of the plan's mesh."""

    data: Axis
    """Ranks with the same parameters and different samples."""
    sequence: Axis
    """Ranks with the same parameters and a different part of the same samples (Ulysses)."""
    context: Axis
    """Ranks with the same parameters and other chunks of the same samples (ring attention)."""
    tensor: Axis
    """Ranks with a different shard of the same matrices."""
    pipeline: Axis
    """Ranks with different blocks."""
    replicas: Axis
    """data, context and sequence together: ZeRO partitions and gradients are averaged over these
    ranks.
    """
    shards: Axis
    """Neighbours of `replicas` that FSDP2 shards over: all of them, or with HSDP a shard group."""
    copies: Axis
    """Ranks of `replicas` that hold the same shard; this rank alone without HSDP."""
    expert: Axis
    """Neighbours on the data axis and all their tensor ranks, each with different experts of every
    layer. One rank if experts are not shared out.
    """
    expert_replicas: Axis
    """Ranks of `replicas` that hold the same experts."""
    timeout: timedelta
    """Time limit of a collective."""

    @property
    def part(self) -> SequencePart:
        """This rank's part of every sequence."""
        sequence, context = self.sequence, self.context
        return SequencePart(sequence.index, sequence.size, context.index, context.size)

    @property
    def is_data_only(self) -> bool:
        return self.replicas.size == self.data.size and self._world_size == self.data.size

    def join_stage(self) -> Axis:
        """Return all ranks with the same blocks, replica by replica; all ranks call it together."""
        tensor, replicas = self.tensor, self.replicas
        if 1 in (tensor.size, replicas.size):
            return replicas if tensor.size == 1 else tensor
        firsts = (rank - tensor.index for rank in replicas.ranks)
        ranks = tuple(first + index for first in firsts for index in range(tensor.size))
        group = dist.new_group(ranks, timeout=self.timeout, use_local_synchronization=True)
        return Axis(replicas.index * tensor.size + tensor.index, ranks, group)

    @property
    def _world_size(self) -> int:
        return self.replicas.size * self.tensor.size * self.pipeline.size


def join_mesh(
    shape: Mesh,
    rank: int,
    timeout: timedelta,
    *,
    shard_ranks: int | None = None,
    is_folded: bool = False,
) -> ProcessMesh:
    """Find this rank's position and make its groups; every rank calls it at the same point.

    The ranks are ordered as in `plan.types.Mesh`: tensor fastest, pipeline slowest.

    Args:
        shard_ranks: Size of a shard group (HSDP); by default all replicas are one.
        is_folded: Whether the first pipeline rank has the last stage too.
    """
    sizes = (shape.pipeline, shape.data, shape.context, shape.sequence, shape.tensor)
    of_experts = (shape.pipeline, shape.data // shape.expert, shape.expert, *sizes[2:])
    ranks = np.arange(shape.world_size).reshape(sizes)
    place = (int(index) for index in np.unravel_index(rank, sizes))
    pipeline, data, context, sequence, tensor = place

    def axis(name: str, members: Any) -> Axis:
        listed: Sequence[int] = [int(member) for member in members.flatten()]
        # Only its members make the group, without a barrier of the whole world. Every rank makes
        # a group at the same time, because NCCL splits them off the group of all ranks.
        group = dist.new_group(
            listed, timeout=timeout, use_local_synchronization=True, group_desc=name
        )
        return Axis(listed.index(rank), tuple(listed), group)

    replicas = axis("replicas", ranks[pipeline, ..., tensor])
    groups = np.array(replicas.ranks).reshape(-1, shard_ranks or replicas.size)
    group, position = divmod(replicas.index, groups.shape[1])
    split, (copy, expert) = ranks.reshape(of_experts), divmod(data, shape.expert)
    sharing = tensor if shape.expert == 1 else slice(None)
    same_experts = split[pipeline, :, expert, ..., tensor]
    return ProcessMesh(
        data=axis("data", ranks[pipeline, :, context, sequence, tensor]),
        sequence=axis("sequence", ranks[pipeline, data, context, :, tensor]),
        context=axis("context", ranks[pipeline, data, :, sequence, tensor]),
        tensor=axis("tensor", ranks[pipeline, data, context, sequence, :]),
        pipeline=replace(
            axis("pipeline", ranks[:, data, context, sequence, tensor]), is_folded=is_folded
        ),
        replicas=replicas,
        shards=replicas if len(groups) == 1 else axis("shards", groups[group]),
        copies=axis("copies", groups[:, position]),
        expert=axis("expert", split[pipeline, copy, :, context, sequence, sharing]),
        expert_replicas=replicas if shape.expert == 1 else axis("expert_replicas", same_experts),
        timeout=timeout,
    )
