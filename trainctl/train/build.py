"""From the skeleton to a model with weights: whole on each rank, or partitioned block by block."""

from __future__ import annotations

import ctypes
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.train.weights import WeightSource


def canonical_names(model: nn.Module) -> dict[int, str]:
    """The canonical name of each parameter, by `id`; a tied parameter has its first name."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def materialise(model: PreTrainedModel, source: WeightSource, device: torch.device) -> None:
    """Give every rank the whole model: ZeRO stages 0 to 2."""
    filled: dict[int, nn.Parameter] = {}
    for module, attribute, meta, name in _slots(model):
        if id(meta) not in filled:
            values = source.read(name, meta.shape, 0, meta.numel())
            data = values.view(meta.shape).to(device=device, dtype=meta.dtype)
            filled[id(meta)] = nn.Parameter(data, requires_grad=meta.requires_grad)
        setattr(module, attribute, filled[id(meta)])
    _move_buffers(model, device)


def materialise_partitioned(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    deepspeed_json: dict[str, Any],
) -> None:
    """Give each rank its partition of every parameter: ZeRO stage 3.

    DeepSpeed partitions one parameter at a time, so no rank ever holds more than that whole, and
    each rank then computes or reads the values of its own partition only. (The usual `zero.Init`
    around the constructor lets the model initialise tensors that are no longer whole, which is
    silently wrong.)
    """
    filled: dict[int, nn.Parameter] = {}
    swapper = None  # to NVMe, with buffers that all parameters share
    # One buffer for all of them in turn.
    largest = max(meta.numel() for meta in model.parameters())
    whole = torch.empty(largest, dtype=model.dtype, device=device)
    for module, attribute, meta, name in _slots(model):
        if id(meta) not in filled:
            unset = whole[: meta.numel()].view(meta.shape)
            parameter = nn.Parameter(unset, requires_grad=meta.requires_grad)
            filled[id(meta)] = parameter
            holder = nn.Module()
            holder.weight = parameter
            deepspeed.zero.Init(
                module=holder,
                config_dict_or_path=deepspeed_json,
                dtype=meta.dtype,
                param_swapper=swapper,
            )
            swapper = parameter.nvme_swapper
            _fill_partition(parameter, name, source)
            _return_freed_memory()
        setattr(module, attribute, filled[id(meta)])
    _move_buffers(model, device)


def partition_range(parameter: Any) -> tuple[int, int]:
    """This rank's range [start, end) of a parameter that ZeRO-3 partitioned, without padding."""
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def _fill_partition(parameter: Any, name: str, source: WeightSource) -> None:
    start, end = partition_range(parameter)
    on_nvme = parameter.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
    if on_nvme:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    partition = parameter.ds_tensor.data
    partition.zero_()
    if end > start:
        values = source.read(name, parameter.ds_shape, start, end)
        partition.view(-1)[: end - start].copy_(values)
    if on_nvme:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def _return_freed_memory() -> None:
    """Give what was freed back to the system: partitions taken in between keep glibc from it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter, str]]:
    """Every place of a parameter in the tree, with the parameter's canonical name."""
    names = canonical_names(model)
    return [
        (module, attribute, parameter, names[id(parameter)])
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
