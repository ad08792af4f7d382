"""ZeRO-3 parameters, partitioned one at a time: a rank holds at most one whole parameter."""

from __future__ import annotations

import ctypes
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import groups
from torch import nn

from trainctl.engines.deepspeed.process_groups import model_parallel_unit, set_partition_group
from trainctl.engines.process import ProcessMesh
from trainctl.engines.shards import ParameterPiece, Read


class Partitioner:
    """Maker of this rank's partition of each parameter, which reads no other values.

    (The usual `zero.Init` around the constructor lets the model initialise tensors that are no
    longer whole, which is silently wrong.)

    Args:
        settings: DeepSpeed's JSON in the plan.
        skeleton: The model on the meta device, cut to this rank's shards.
        device: Device of the partitions.
        mesh: This rank's mesh; None if all ranks are data-parallel.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        skeleton: nn.Module,
        device: torch.device,
        mesh: ProcessMesh | None = None,
    ) -> None:
        self._settings = settings
        self._unit = None if mesh is None else model_parallel_unit(mesh)
        self._group = None if mesh is None or mesh.is_data_only else mesh.replicas.group
        self._experts = None if mesh is None else mesh.expert_replicas.group
        self._swapper: Any = None  # NVMe swapper; all parameters share its buffers
        # One buffer that each parameter uses in turn, before it is partitioned.
        largest = max(each.numel() * each.element_size() for each in skeleton.parameters())
        self._whole = torch.empty(largest, dtype=torch.uint8, device=device)

    def __call__(self, meta: nn.Parameter, piece: ParameterPiece, read: Read) -> nn.Parameter:
        """Return the parameter that replaces the skeleton's, with the values of this rank's
        partition.
        """
        size = meta.numel() * meta.element_size()
        unset = self._whole[:size].view(meta.dtype).view(meta.shape)
        parameter = nn.Parameter(unset, requires_grad=meta.requires_grad)
        if piece.is_expert:
            assert self._experts is not None
            set_partition_group(parameter, self._experts)
        holder = nn.Module()
        holder.weight = parameter
        deepspeed.zero.Init(
            module=holder,
            # No `dtype`: given one on a device without fp16, DeepSpeed takes bf16 in its place, and
            # would swap fp32 weights through bf16 buffers. From the JSON it takes the right one.
            config_dict_or_path=self._settings,
            mpu=self._unit,
            data_parallel_group=self._group,
            param_swapper=self._swapper,
            # DeepSpeed's engine passes this too; it has no public name.
            zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
        )
        self._swapper = parameter.nvme_swapper
        # ZeRO++'s copy within the node was taken before the values are set; the next gather
        # makes a new one.
        parameter.ds_secondary_tensor = None
        _fill_partition(parameter, read)
        _return_freed_memory()
        return parameter


def partition_range(parameter: Any) -> tuple[int, int]:
    """Return this rank's range [start, end) of a parameter that ZeRO-3 partitioned, without
    padding.
    """
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def _fill_partition(parameter: Any, read: Read) -> None:
    start, end = partition_range(parameter)
    on_nvme = parameter.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
    if on_nvme:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    partition = parameter.ds_tensor.data
    partition.zero_()
    if end > start:
        partition.view(-1)[: end - start].copy_(read(start, end))
    if on_nvme:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def _return_freed_memory() -> None:
    """Return freed memory to the system: glibc keeps it, because partitions lie between freed
    blocks.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
