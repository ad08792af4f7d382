"""Filling a skeleton with weights."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.engines.protocol import MakeParameter
from trainctl.engines.shards import ParameterPiece, Pieces, Read, Shard, read_shard
from trainctl.models.hf_weights import Buffer, persistent_buffers
from trainctl.train.models.weights import WeightSource


def whole_pieces(model: PreTrainedModel) -> Pieces:
    """Return the pieces of a whole skeleton. A tied parameter goes by its first name."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model.get_output_embeddings(), "weight", None)
    inputs_first = {module.weight for module in model.modules() if isinstance(module, Conv1D)}
    return {
        parameter: ParameterPiece(
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
    make: MakeParameter | None = None,
    buffers: Sequence[Buffer] | None = None,
) -> Pieces:
    """Give this rank's part of the skeleton its values.

    Args:
        model: The skeleton, cut to this rank's stage and shards.
        pieces: Pieces of the skeleton's parameters; None for a whole model.
        make: Makes each parameter where ranks partition it (ZeRO-3); None gives this rank all of
            it.
        buffers: Persistent buffers of the skeleton; None for a whole model.

    Returns:
        The pieces of the real parameters.
    """
    pieces = whole_pieces(model) if pieces is None else pieces
    make = make or partial(_whole_shard, device)
    filled: dict[nn.Parameter, nn.Parameter] = {}
    for module, attribute, meta in _parameter_places(model):
        if meta not in filled:
            piece = pieces[meta]
            read = partial(source.read, piece.name, piece.shape)
            filled[meta] = make(meta, piece, partial(read_shard, read, piece.shard))
        setattr(module, attribute, filled[meta])
    fill_buffers(persistent_buffers(model) if buffers is None else buffers, source)
    _move_buffers(model, device)
    return {filled[meta]: piece for meta, piece in pieces.items() if meta in filled}


def fill_buffers(buffers: Iterable[Buffer], source: WeightSource) -> None:
    """Copy a source's values into persistent buffers, where the source has them."""
    for buffer in buffers:
        values = source.buffer(buffer.name)
        if values is not None:
            buffer.tensor.copy_(values.view(buffer.tensor.shape))


def _whole_shard(
    device: torch.device, meta: nn.Parameter, piece: ParameterPiece, read: Read
) -> nn.Parameter:
    """Return this rank's shard of a parameter, unpartitioned."""
    data = read(0, meta.numel()).view(meta.shape).to(device=device, dtype=meta.dtype)
    return nn.Parameter(data, requires_grad=meta.requires_grad)


def _parameter_places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return every place of a parameter in the module tree; a tied parameter has several."""
    return [
        (module, attribute, parameter)
        for module in model.modules()
        for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
    ]


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
