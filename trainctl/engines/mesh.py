"""Where this rank is on the mesh, and the process groups along its axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from trainctl.plan.types import Mesh


@dataclass(frozen=True, slots=True)
class Axis:
    """This rank among those that differ from it in one coordinate (or two) only.

    Attributes:
        index: Its place among them.
        ranks: Their global ranks, in order.
        group: Their process group.
    """

    index: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1


@dataclass(frozen=True, slots=True)
class ProcessMesh:
    """This rank on each axis of the plan's mesh.

    Attributes:
        data: Ranks with the same parameters and other samples.
        sequence: Ranks with the same parameters and another part of the same samples.
        tensor: Ranks with another shard of the same matrices.
        pipeline: Ranks with other blocks.
        replicas: data and sequence together: over these ZeRO partitions and gradients are averaged.
    """

    data: Axis
    sequence: Axis
    tensor: Axis
    pipeline: Axis
    replicas: Axis

    @property
    def is_data_only(self) -> bool:
        return self.replicas.size == self.data.size and self._world_size == self.data.size

    @property
    def _world_size(self) -> int:
        return self.replicas.size * self.tensor.size * self.pipeline.size

    @property
    def model_parallel_unit(self) -> ModelParallelUnit | None:
        """What `deepspeed.initialize` takes as `mpu`; None where data parallel is the only axis."""
        return None if self.is_data_only else ModelParallelUnit(self)


def join_mesh(shape: Mesh, rank: int, timeout: timedelta) -> ProcessMesh:
    """Find this rank's place and make its groups; every rank calls it at the same point.

    The order of the ranks is that of `plan.types.Mesh`: tensor fastest, pipeline slowest.
    """
    sizes = (shape.pipeline, shape.data, shape.sequence, shape.tensor)
    ranks = np.arange(shape.world_size).reshape(sizes)
    pipeline, data, sequence, tensor = (int(index) for index in np.unravel_index(rank, sizes))

    def axis(members: Any) -> Axis:
        listed: Sequence[int] = [int(member) for member in members.flatten()]
        # Made by its members alone: no barrier of the whole world for each group. Every rank makes
        # one at the same time, since NCCL splits them off the group of all ranks.
        group = dist.new_group(listed, timeout=timeout, use_local_synchronization=True)
        return Axis(listed.index(rank), tuple(listed), group)

    return ProcessMesh(
        data=axis(ranks[pipeline, :, sequence, tensor]),
        sequence=axis(ranks[pipeline, data, :, tensor]),
        tensor=axis(ranks[pipeline, data, sequence, :]),
        pipeline=axis(ranks[:, data, sequence, tensor]),
        replicas=axis(ranks[pipeline, :, :, tensor]),
    )


class ModelParallelUnit:
    """A mesh without pipeline stages, by the names that DeepSpeed asks for (utils/groups.py).

    It hears of the replicas and not of the sequence axis by itself: with one, it averages gradients
    over all replicas in some paths and over the data-parallel ranks in others (stage3.py, lines
    1878 and 2279 against reduce_scatter_coalesced), and it sends them in another format.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        self._mesh = mesh

    def get_model_parallel_rank(self) -> int:
        return self._mesh.tensor.index

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.tensor.size

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.tensor.group

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self) -> int:
        return self._mesh.data.index

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.data.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.data.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self._mesh.data.ranks)

    def get_sequence_data_parallel_rank(self) -> int:
        return self._mesh.replicas.index

    def get_sequence_data_parallel_world_size(self) -> int:
        return self._mesh.replicas.size

    def get_sequence_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.replicas.group
