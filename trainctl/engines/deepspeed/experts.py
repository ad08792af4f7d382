"""Registration of experts, which only some of the replicas hold, with DeepSpeed.

DeepSpeed knows them by marks on the parameters and by tables of process groups. Their gradients are
summed over the replicas of the same experts and divided by the number of all replicas, because the
exchange has brought each expert the tokens of all. ZeRO partitions them over the same smaller
group.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from trainctl.engines.protocol import Job

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


def partition_over(parameter: Any, group: dist.ProcessGroup) -> None:
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
    # Stage 3 needs no marker and refuses it. DeepSpeed rejects one without expert parameters.
    if of_experts and job.plan.config.zero_stage.stage < 3:
        module.add_module("expert_marker", _Marker(mesh.expert.size))
