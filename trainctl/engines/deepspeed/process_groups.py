"""The mesh in DeepSpeed's terms: its `mpu`, and the process groups of experts.

Only some of the replicas hold an expert. DeepSpeed knows experts by marks on the parameters and by
tables of process groups. Their gradients are summed over the replicas of the same experts and
divided by the number of all replicas, because the exchange has brought each expert the tokens of
all. ZeRO partitions them over the same smaller group.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from trainctl.engines.process import ProcessMesh
from trainctl.engines.protocol import Job


def model_parallel_unit(mesh: ProcessMesh) -> Any:
    """Return the `mpu` of a mesh without pipeline stages, with the methods that DeepSpeed calls
    (utils/groups.py); None if data parallelism is its only axis.

    It offers the replicas, but not the sequence axis alone. Given the sequence axis, DeepSpeed
    averages gradients over all replicas in some paths and over the data-parallel ranks in others
    (stage3.py, lines 1878 and 2279 against reduce_scatter_coalesced), and sends them in another
    format.
    """
    if mesh.is_data_only:
        return None
    unit = SimpleNamespace(get_data_parallel_group_ranks=lambda: list(mesh.data.ranks))
    axes = {
        "model_parallel": mesh.tensor,
        "tensor_model_parallel": mesh.tensor,
        "data_parallel": mesh.data,
        "sequence_data_parallel": mesh.replicas,
    }
    for name, axis in axes.items():
        setattr(unit, f"get_{name}_rank", partial(getattr, axis, "index"))
        setattr(unit, f"get_{name}_world_size", partial(getattr, axis, "size"))
        setattr(unit, f"get_{name}_group", partial(getattr, axis, "group"))
    return unit


_FAMILY = "autoep_expert"
"""ZeRO 3's name for parameters that it partitions over fewer replicas than the others."""


_FROZEN = "frozen_experts"
"""Name of the process groups where no parameter group has experts."""


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
    experts = [parameter for parameter, piece in job.pieces.items() if piece.is_expert]
    named = {group["name"]: group["params"] for group in job.groups if group["moe"]}
    # Frozen experts are in no group; DeepSpeed would broadcast them from the first replica.
    default = next(iter(named), _FROZEN)
    for name in {default, *named}:
        groups._EXPERT_PARALLEL_GROUP[name] = mesh.expert.group
        groups._EXPERT_PARALLEL_GROUP_RANKS[name] = list(mesh.expert.ranks)
        groups._EXPERT_DATA_PARALLEL_GROUP[name] = mesh.expert_replicas.group
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = list(mesh.expert_replicas.ranks)
    names = {parameter: name for name, listed in named.items() for parameter in listed}
    for parameter in experts:
        parameter.allreduce = False
        parameter.group_name = names.get(parameter, default)
        parameter.ds_zero_placement_family = _FAMILY
        # Stage 3 averages parameters of several groups in one bucket, under one group name.
        parameter.ds_zero_partition_group_name = default
    # Stage 3 needs no marker and refuses it. DeepSpeed refuses a marker without expert parameters.
    if named and job.plan.config.zero_stage.stage < 3:
        module.add_module("expert_marker", _Marker(mesh.expert.size))
