"""The mesh in DeepSpeed's terms: its `mpu`, and the process groups of experts.

Only some of the replicas hold an expert. DeepSpeed knows experts by marks on the parameters and by
tables of process groups. Their gradients are summed over the replicas of the same experts and
divided by the number of all replicas, because the exchange has brought each expert the tokens of
all. ZeRO partitions them over the same smaller group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from trainctl.engines.process import ProcessMesh
from trainctl.engines.protocol import Job


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


def model_parallel_unit(mesh: ProcessMesh) -> ModelParallelUnit | None:
    """Return the `mpu` of a mesh; None if data parallelism is its only axis."""
    return None if mesh.is_data_only else ModelParallelUnit(mesh)


_FAMILY = "autoep_expert"
"""ZeRO 3's name for parameters that it partitions over fewer replicas than the others."""


class _Marker(MoE):
    """A module without parameters: below stage 3, DeepSpeed detects experts by a module of class
    `MoE`.
    """

    def __init__(self, num_experts: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = num_experts

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Do nothing: the groups exist already."""


def set_partition_group(parameter: Any, group: dist.ProcessGroup) -> None:
    """Make `zero.Init` partition a parameter over a group of its own."""
    parameter.ds_zero_partition_process_group = group


def register_experts(module: nn.Module, job: Job) -> None:
    """Mark the experts among a job's parameters, and enter their groups in DeepSpeed's tables.

    DeepSpeed looks the groups up by the name of a parameter group.

    Args:
        module: The module that DeepSpeed trains; it may get a child without parameters.
    """
    mesh = job.mesh
    of_experts = [group for group in job.groups if group["moe"]]
    for group in of_experts:
        name = group["name"]
        groups._EXPERT_PARALLEL_GROUP[name] = mesh.expert.group
        groups._EXPERT_PARALLEL_GROUP_RANKS[name] = list(mesh.expert.ranks)
        groups._EXPERT_DATA_PARALLEL_GROUP[name] = mesh.expert_replicas.group
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = list(mesh.expert_replicas.ranks)
        for parameter in group["params"]:
            parameter.allreduce = False
            parameter.group_name = name
            parameter.ds_zero_placement_family = _FAMILY
            # Stage 3 averages parameters of several groups in one bucket, under one group name.
            parameter.ds_zero_partition_group_name = of_experts[0]["name"]
    # Stage 3 needs no marker and refuses it. DeepSpeed refuses a marker without expert parameters.
    if of_experts and job.plan.config.zero_stage.stage < 3:
        module.add_module("expert_marker", _Marker(mesh.expert.size))
