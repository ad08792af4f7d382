"""DeepSpeed's checkpoints that are cut over model-parallel ranks: pipeline stages, tensor slices.

Each rank's files are a `Source` of their own. A stage has whole parameters, named by the number of
their layer in the pipeline. A tensor rank has a slice of each matrix; `universal_checkpoint_info`
says along which dimension (deepspeed/checkpoint/ds_to_universal.py, `merge_tp_slices`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from trainctl.engines.shards import Read, Shard, read_whole
from trainctl.errors import TrainctlError
from trainctl.migration.checkpoints.source import Source

UNIVERSAL = (
    "convert it to a universal checkpoint where it was trained: "
    "python -m deepspeed.checkpoint.ds_to_universal --input_folder DIR --output_folder OUT"
)

ROWS, REPLICATED = "parameter_with_row_parallelism_patterns", "tp_replicated_parameter_patterns"
"""Lists of patterns: cut along the second dimension, and whole on every rank. Others are cut along
the first.
"""

_NOT_READ = (
    "parameter_to_average_patterns",
    "parameter_with_2_sub_params_cat_dim_0",
    "parameter_with_sub_params",
    "autotp_unsupported_parameter_patterns",
)
"""Further lists: such parameters are refused."""

Shape = tuple[int, ...]


class ModelParallelSource(Source):
    """A checkpoint whose ranks are sources of their own; progress is that of the first."""

    format = "deepspeed"

    def __init__(self, directory: Path, ranks: Sequence[Source]) -> None:
        first = ranks[0]
        self.path, self.notes, self._ranks = directory, list(first.notes), ranks
        self.states, self.scalars, self.progress = first.states, first.scalars, first.progress
        self.hyperparameters, self.loss_scale = first.hyperparameters, first.loss_scale
        self.untrained = frozenset().union(*(rank.untrained for rank in ranks))
        self.unchecked = (
            *first.unchecked,
            "that no two files of model-parallel ranks were swapped: their names alone tell",
        )
        self.shapes: dict[str, Shape] = {}
        self._parts: dict[str, dict[Shard, tuple[Source, str]]] = {}
        """Shards of each parameter, with the rank that has it and its name there."""

    def read(self, parameter: str, state: str, start: int, end: int) -> torch.Tensor:
        shards: dict[Shard, Read] = {
            shard: partial(rank.read, name, state)
            for shard, (rank, name) in self._parts[parameter].items()
        }
        return read_whole(shards, start, end)

    def verify(self) -> None:
        for rank in self._ranks:
            rank.verify()


class PipelineSource(ModelParallelSource):
    """Stages of a pipeline; the names are known once the model is."""

    def __init__(self, directory: Path, ranks: Sequence[Source]) -> None:
        super().__init__(directory, ranks)
        for rank in ranks:
            for name, shape in rank.shapes.items():
                if name not in self.shapes:  # the last stage has tied weights again
                    self.shapes[name] = shape
                    self._parts[name] = {Shard.whole(torch.Size(shape)): (rank, name)}

    def use_model(self, model: PreTrainedModel) -> None:
        wanted = {name: tuple(each.shape) for name, each in model.named_parameters()}
        named = {there: name for name, there in pipeline_names(self.shapes, wanted).items()}
        self._parts = {named.get(name, name): parts for name, parts in self._parts.items()}
        self.untrained = frozenset(named.get(name, name) for name in self.untrained)
        self.shapes = {named.get(name, name): shape for name, shape in self.shapes.items()}


class TensorParallelSource(ModelParallelSource):
    """Slices of tensor-parallel ranks.

    Args:
        info: `universal_checkpoint_info` of the model's state.

    Raises:
        TrainctlError: It does not say how a parameter is cut.
    """

    def __init__(self, directory: Path, ranks: Sequence[Source], info: Mapping[str, Any]) -> None:
        super().__init__(directory, ranks)
        if not info.get(REPLICATED) and not info.get(ROWS):
            raise TrainctlError(
                f"{directory} does not say how its {len(ranks)} tensor-parallel ranks cut the "
                "parameters",
                hint=UNIVERSAL,
            )
        for name in ranks[0].shapes:
            shapes = [rank.shapes[name] for rank in ranks if name in rank.shapes]
            if len(shapes) < len(ranks) or any(_matches(info, key, name) for key in _NOT_READ):
                raise TrainctlError(
                    f"{directory}: how {name} is cut over tensor-parallel ranks is not read",
                    hint=UNIVERSAL,
                )
            if _matches(info, REPLICATED, name):
                self.shapes[name] = shapes[0]
                self._parts[name] = {Shard.whole(torch.Size(shapes[0])): (ranks[0], name)}
            else:
                self._add_slices(name, shapes, 1 if _matches(info, ROWS, name) else 0)

    def _add_slices(self, name: str, shapes: Sequence[Shape], dimension: int) -> None:
        whole = list(shapes[0])
        whole[dimension] = sum(shape[dimension] for shape in shapes)
        inner = torch.Size(whole[dimension + 1 :]).numel()
        self.shapes[name], self._parts[name] = tuple(whole), {}
        start = 0
        for rank, shape in zip(self._ranks, shapes, strict=True):
            stop = start + shape[dimension] * inner
            self._parts[name][Shard(whole[dimension] * inner, start, stop)] = (rank, name)
            start = stop


def _matches(info: Mapping[str, Any], key: str, name: str) -> bool:
    patterns = info.get(key) or ()
    found = [
        pattern
        for each in patterns
        for pattern in (each.get("patterns", ()) if isinstance(each, dict) else [each])
    ]
    return any(re.match(pattern, name) for pattern in found)


_LAYER = re.compile(r"(?:.*?\.)?(\d+)\.(.+)")
"""A name with the number of a layer: `model.layers.0.mlp.up_proj.weight`, `1.mlp.up_proj.weight`.
"""


def pipeline_names(found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> dict[str, str]:
    """Return the name in a pipeline of each of the model's parameters, as far as it follows.

    A layer with the parameters of the model's next block is that block. What is before the first
    block and behind the last one is found by its shape, and by the last part of its name.

    Args:
        found: Shapes by the names in the pipeline, which begin with the number of a layer; tied
            weights have another name (`tied_modules.KEY...`).
        wanted: Shapes by the names of transformers, in the model's order.
    """
    layers, blocks = _by_layer(found), _by_layer(wanted)
    names: dict[str, str] = {}
    ahead = iter(sorted(layers))
    used: list[int] = []
    for block in sorted(blocks):
        for layer in ahead:
            inner = _inner_prefix(layers[layer], blocks[block])
            if inner is not None:
                used.append(layer)
                for rest, name in blocks[block].items():
                    names[name] = layers[layer][inner + rest]
                break
    numbered = {name for block in blocks.values() for name in block.values()}
    before = True
    for name, shape in wanted.items():
        if name in numbered:
            before = False
            continue
        fitting = [
            there
            for there in found
            if found[there] == shape
            and there not in names.values()
            and there.rpartition(".")[2] == name.rpartition(".")[2]
            and _is_on_side(there, used, before)
        ]
        if len(fitting) == 1:
            names[name] = fitting[0]
    return names


def _by_layer(shapes: Mapping[str, Shape]) -> dict[int, dict[str, str]]:
    """Return the names of each layer, by what follows its number."""
    layers: dict[int, dict[str, str]] = {}
    for name in shapes:
        match = _LAYER.fullmatch(name)
        if match is not None:
            layers.setdefault(int(match[1]), {})[match[2]] = name
    return layers


def _inner_prefix(layer: Mapping[str, str], block: Mapping[str, str]) -> str | None:
    """Return what a layer's names have before those of the block; None if it is another layer."""
    first = next(iter(block))
    for name in layer:
        if name.endswith(first):
            prefix = name.removesuffix(first)
            if {prefix + rest for rest in block} == set(layer):
                return prefix
    return None


def _is_on_side(name: str, blocks: Sequence[int], before: bool) -> bool:
    """Return True if a parameter is before the blocks, or behind them; tied ones are on both."""
    match = re.match(r"(\d+)\.", name)
    if match is None or not blocks:
        return True
    return int(match[1]) < blocks[0] if before else int(match[1]) > blocks[-1]
