"""The mesh in DeepSpeed's interface: the `mpu` of `deepspeed.initialize` and `zero.Init`."""

from __future__ import annotations

import torch.distributed as dist

from trainctl.engines.mesh import ProcessMesh


class ModelParallelUnit:
    """A mesh without pipeline stages, with the methods that DeepSpeed calls (utils/groups.py).

    It offers the replicas, but not the sequence axis alone. Given the sequence axis, DeepSpeed
    averages gradients over all replicas in some paths and over the data-parallel ranks in others
    (stage3.py, lines 1878 and 2279 against reduce_scatter_coalesced), and sends them in another
    format.
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


def unit_of(mesh: ProcessMesh) -> ModelParallelUnit | None:
    """Return the `mpu` of a mesh; None if data parallelism is its only axis."""
    return None if mesh.is_data_only else ModelParallelUnit(mesh)
