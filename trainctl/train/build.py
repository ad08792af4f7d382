"""From the skeleton to a model with weights: whole on each rank, or partitioned block by block."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from deepspeed.utils import groups
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.shards import Piece, Pieces, Shard, read_shard
from trainctl.train.weights import WeightSource


def whole_pieces(model: PreTrainedModel) -> Pieces:
    """The pieces of a whole skeleton; a tied parameter has its first name."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model.get_output_embeddings(), "weight", None)
    inputs_first = {module.weight for module in model.modules() if isinstance(module, Conv1D)}
    return {
        parameter: Piece(
            name,
            parameter.shape,
            Shard.whole(parameter.shape),
            is_embedding=parameter in embeddings,
            is_head=parameter is head,
            inputs_first=parameter in inputs_first,
        )
        for name, parameter in model.named_parameters()
    }


def materialise(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    pieces: Pieces | None = None,
) -> Pieces:
    """Give the rank all that the skeleton has: ZeRO stages 0 to 2.

    Args:
        model: The skeleton, cut to this rank's stage and shards.
        source: Of the values.
        device: Of the parameters.
        pieces: Of the skeleton's parameters; none if it is a whole model.

    Returns:
        The pieces of the real parameters.
    """
    pieces = whole_pieces(model) if pieces is None else pieces
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module, attribute, meta in _slots(model):
        if meta not in filled:
            values = _values(source, pieces[meta], 0, meta.numel())
            data = values.view(meta.shape).to(device=device, dtype=meta.dtype)
            filled[meta] = nn.Parameter(data, requires_grad=meta.requires_grad)
        setattr(module, attribute, filled[meta])
    _move_buffers(model, device)
    return _real(pieces, filled)


def materialise_partitioned(
    model: PreTrainedModel,
    source: WeightSource,
    device: torch.device,
    deepspeed_json: dict[str, Any],
    pieces: Pieces | None = None,
    mesh: ProcessMesh | None = None,
) -> Pieces:
    """Give each rank its partition of every parameter: ZeRO stage 3.

    DeepSpeed partitions one parameter at a time, so no rank ever holds more than that whole, and
    each rank then computes or reads the values of its own partition only. (The usual `zero.Init`
    around the constructor lets the model initialise tensors that are no longer whole, which is
    silently wrong.)

    Args:
        model: The skeleton, cut to this rank's shards.
        source: Of the values.
        device: Of the partitions.
        deepspeed_json: The plan's.
        pieces: Of the skeleton's parameters; none if it is a whole model.
        mesh: This rank's; none if all ranks are data-parallel.

    Returns:
        The pieces of the partitioned parameters.
    """
    pieces = whole_pieces(model) if pieces is None else pieces
    unit, group = None, None
    if mesh is not None and not mesh.is_data_only:
        unit, group = mesh.model_parallel_unit, mesh.replicas.group
    filled: dict[nn.Parameter, nn.Parameter] = {}
    swapper = None  # to NVMe, with buffers that all parameters share
    # One buffer for all of them in turn.
    largest = max(meta.numel() for meta in model.parameters())
    whole = torch.empty(largest, dtype=model.dtype, device=device)
    for module, attribute, meta in _slots(model):
        if meta not in filled:
            unset = whole[: meta.numel()].view(meta.shape)
            parameter = nn.Parameter(unset, requires_grad=meta.requires_grad)
            filled[meta] = parameter
            holder = nn.Module()
            holder.weight = parameter
            deepspeed.zero.Init(
                module=holder,
                # Without `dtype`: on a device without fp16 DeepSpeed takes bf16 in its place, and
                # would swap fp32 weights through bf16 buffers; by the JSON it takes the right one.
                config_dict_or_path=deepspeed_json,
                mpu=unit,
                data_parallel_group=group,
                param_swapper=swapper,
                zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),
            )
            swapper = parameter.nvme_swapper
            # ZeRO++'s copy in the node is of what is not set yet; the next gather makes it anew.
            parameter.ds_secondary_tensor = None
            _fill_partition(parameter, pieces[meta], source)
            _return_freed_memory()
        setattr(module, attribute, filled[meta])
    _move_buffers(model, device)
    return _real(pieces, filled)


def _values(source: WeightSource, piece: Piece, start: int, end: int) -> torch.Tensor:
    """Elements [start, end) of a rank's flattened shard."""
    return read_shard(partial(source.read, piece.name, piece.shape), piece.shard, start, end)


def _real(pieces: Pieces, filled: dict[nn.Parameter, nn.Parameter]) -> Pieces:
    """The pieces by the parameters that took the skeleton's place, marked for DeepSpeed."""
    real = {filled[meta]: piece for meta, piece in pieces.items() if meta in filled}
    for parameter, piece in real.items():
        # Of a parameter that is not split, one tensor rank alone counts in the gradient's norm.
        parameter.model_parallel = not piece.shard.is_whole
    return real


def partition_range(parameter: Any) -> tuple[int, int]:
    """This rank's range [start, end) of a parameter that ZeRO-3 partitioned, without padding."""
    size = parameter.ds_tensor.ds_numel
    start = min(parameter.ds_zero_partition_rank * size, parameter.ds_numel)
    return start, min(start + size, parameter.ds_numel)


def _fill_partition(parameter: Any, piece: Piece, source: WeightSource) -> None:
    start, end = partition_range(parameter)
    on_nvme = parameter.ds_tensor.status is PartitionedParamStatus.NOT_AVAILABLE
    if on_nvme:
        parameter.nvme_swapper.swap_in([parameter], async_op=False)
    partition = parameter.ds_tensor.data
    partition.zero_()
    if end > start:
        values = _values(source, piece, start, end)
        partition.view(-1)[: end - start].copy_(values)
    if on_nvme:
        parameter.nvme_swapper.swap_out_and_release([parameter])


def _return_freed_memory() -> None:
    """Give what was freed back to the system: partitions taken in between keep glibc from it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _slots(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Every place of a parameter in the tree."""
    return [
        (module, attribute, parameter)
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
