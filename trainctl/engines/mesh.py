"""Position of this rank on the mesh, and the process groups along its axes."""

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
    """The ranks that differ from this one in one coordinate (or two) only."""

    index: int
    """Position of this rank in `ranks`."""
    ranks: tuple[int, ...]
    """Global ranks, in order."""
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
    """Position of this rank on each axis of the plan's mesh."""

    data: Axis
    """Ranks with the same parameters and different samples."""
    sequence: Axis
    """Ranks with the same parameters and a different part of the same samples."""
    tensor: Axis
    """Ranks with a different shard of the same matrices."""
    pipeline: Axis
    """Ranks with different blocks."""
    replicas: Axis
    """data and sequence together: ZeRO partitions and gradients are averaged over these ranks."""
    expert: Axis
    """Neighbours on the data axis, each with different experts of every layer."""
    expert_replicas: Axis
    """Ranks of `replicas` that hold the same experts."""

    @property
    def is_data_only(self) -> bool:
        return self.replicas.size == self.data.size and self._world_size == self.data.size

    @property
    def _world_size(self) -> int:
        return self.replicas.size * self.tensor.size * self.pipeline.size


def join_mesh(shape: Mesh, rank: int, timeout: timedelta) -> ProcessMesh:
    """Find this rank's position and make its groups; every rank calls it at the same point.

    The ranks are ordered as in `plan.types.Mesh`: tensor fastest, pipeline slowest.
    """
    sizes = (shape.pipeline, shape.data, shape.sequence, shape.tensor)
    of_experts = (shape.pipeline, shape.data // shape.expert, shape.expert, *sizes[2:])
    ranks = np.arange(shape.world_size).reshape(sizes)
    pipeline, data, sequence, tensor = (int(index) for index in np.unravel_index(rank, sizes))

    def axis(members: Any) -> Axis:
        listed: Sequence[int] = [int(member) for member in members.flatten()]
        # Only its members make the group, without a barrier of the whole world. Every rank makes
        # a group at the same time, because NCCL splits them off the group of all ranks.
        group = dist.new_group(listed, timeout=timeout, use_local_synchronization=True)
        return Axis(listed.index(rank), tuple(listed), group)

    replicas = axis(ranks[pipeline, :, :, tensor])
    split, (copy, expert) = ranks.reshape(of_experts), divmod(data, shape.expert)
    same_experts = split[pipeline, :, expert, :, tensor]
    return ProcessMesh(
        data=axis(ranks[pipeline, :, sequence, tensor]),
        sequence=axis(ranks[pipeline, data, :, tensor]),
        tensor=axis(ranks[pipeline, data, sequence, :]),
        pipeline=axis(ranks[:, data, sequence, tensor]),
        replicas=replicas,
        expert=axis(split[pipeline, copy, :, sequence, tensor]),
        expert_replicas=replicas if shape.expert == 1 else axis(same_experts),
    )
