"""ZeRO 3's parameters: partitioned one at a time, so no rank ever holds more than one whole."""

from __future__ import annotations

import ctypes
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import groups
from torch import nn

from trainctl.engines.deepspeed.experts import partition_over
from trainctl.engines.deepspeed.model_parallel_unit import unit_of
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.shards import ParameterPiece, Read


class Partitioner:
    """Gives each rank its partition of a parameter; each reads the values of its own only.

    (The usual `zero.Init` around the constructor lets the model initialise tensors that are no
    longer whole, which is silently wrong.)

    Args:
        settings: The plan's JSON.
        skeleton: On the meta device, cut to this rank's shards.
        device: Of the partitions.
        mesh: This rank's; none if all ranks are data-parallel.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        skeleton: nn.Module,
        device: torch.device,
        mesh: ProcessMesh | None = None,
    ) -> None:
        self._settings = settings
        self._unit = None if mesh is None else unit_of(mesh)
        self._group = None if mesh is None or mesh.is_data_only else mesh.replicas.group
        self._experts = None if mesh is None else mesh.expert_replicas.group
        self._swapper: Any = None  # to NVMe, with buffers that all parameters share
        # One buffer for all of them in turn.
        largest = max(each.numel() * each.element_size() for each in skeleton.parameters())
        self._whole = torch.empty(largest, dtype=torch.uint8, device=device)

    def __call__(self, meta: nn.Parameter, piece: ParameterPiece, read: Read) -> nn.Parameter:
        """Return the parameter that takes a skeleton's place, with the values of this rank's
        partition."""
        size = meta.numel() * meta.element_size()
        unset = self._whole[:size].view(meta.dtype).view(meta.shape)
        parameter = nn.Parameter(unset, requires_grad=meta.requires_grad)
        if piece.is_expert:
            assert self._experts is not None
            partition_over(parameter, self._experts)
        holder = nn.Module()
        holder.weight = parameter
        deepspeed.zero.Init(
            module=holder,
            # Without `dtype`: on a device without fp16 DeepSpeed takes bf16 in its place, and
            # would swap fp32 weights through bf16 buffers; by the JSON it takes the right one.
            config_dict_or_path=self._settings,
            mpu=self._unit,
            data_parallel_group=self._group,
            param_swapper=self._swapper,
            # DeepSpeed's engine hands this over too, and there is no public name for it.
            zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
        )
        self._swapper = parameter.nvme_swapper
        # ZeRO++'s copy in the node is of what is not set yet; the next gather makes it anew.
        parameter.ds_secondary_tensor = None
        _fill(parameter, read)
        _return_freed_memory()
        return parameter


def partition_range(parameter: Any) -> tuple[int, int]:
    """This rank's range [start, end) of a parameter that ZeRO-3 partitioned, without padding."""
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def _fill(parameter: Any, read: Read) -> None:
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
    """Give what was freed back to the system: partitions taken in between keep glibc from it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
