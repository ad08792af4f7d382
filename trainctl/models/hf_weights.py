"""Tensors of a model under their canonical names, and their conversion from and to published files.

A parameter with several names, such as a tied head, goes by its first. transformers renames and
joins what it loads: for instance, one tensor per expert on disk becomes one tensor for all experts.
To load, transformers' own conversions are matched to the names in the files and run on meta
tensors, so names and shapes are known to be right before a value is read. To export, they are
applied in reverse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    MergeModulelist,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.models.tensors import (
    FUTURE,
    READABLE,
    SCORE,
    StoredTensor,
    join_first,
    may_be_new,
)


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A persistent buffer of a model, which its published weights contain."""

    name: str
    module: nn.Module
    key: str
    """Attribute name in the module."""

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer's current tensor; assigning to the module may replace it."""
        found = self.module.get_buffer(self.key)
        assert isinstance(found, torch.Tensor)
        return found


def persistent_buffers(model: nn.Module) -> list[Buffer]:
    """Return the floating-point buffers in the model's state dict: a router's bias, but not a
    table of rotary angles.
    """
    kept = model.state_dict().keys()
    found = []
    for path, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if name in kept and tensor.is_floating_point():
                found.append(Buffer(name, module, key))
    return found


def remaining_buffers(model: nn.Module, buffers: Iterable[Buffer]) -> list[Buffer]:
    """Return the buffers whose module is still in the model after it was cut to a stage."""
    here = set(model.modules())
    return [buffer for buffer in buffers if buffer.module in here]


def output_layer(model: nn.Module) -> Any:
    """Return a model's last layer: the projection over the vocabulary, or the head `score` of the
    class that `AutoModelForSequenceClassification` gives; None if it has neither.
    """
    score = getattr(model, SCORE, None)
    return score if isinstance(score, nn.Linear) else model.get_output_embeddings()


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers of a whole model, by canonical name."""
    buffers = {buffer.name: buffer.tensor for buffer in persistent_buffers(model)}
    return dict(model.named_parameters()) | buffers


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each tied parameter, by its canonical name."""
    first: dict[nn.Parameter, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(parameter, name)
        if canonical != name:
            others.setdefault(canonical, []).append(name)
    return others


Fetch = Callable[[str], torch.Tensor]
"""Reader of a tensor of the files, by its name there."""


@dataclass(slots=True)
class ConvertedTensors:
    """Tensors of the files that become one or several tensors of the model."""

    first: str
    """Canonical name of the first tensor that they become."""
    converter: WeightConverter | None
    """transformers' conversion; None takes the only tensor unchanged."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the files, by the converter's pattern, in the converter's order."""
    by_row: bool = False
    """Whether each row of the result (an expert) is made of the tensors at its index only."""

    @property
    def names(self) -> list[str]:
        return [name for listed in self.sources.values() for name in listed]

    def convert(
        self, model: PreTrainedModel, fetch: Fetch, row: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Convert the files' tensors to the model's; with `row`, only that row of the result."""
        assert self.converter is not None
        converter = deepcopy(self.converter)
        for pattern, listed in self.sources.items():
            for name in listed if row is None else listed[row : row + 1]:
                converter.add_tensor(self.first, name, pattern, _deferred_fetch(fetch, name))
        made = converter.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def _deferred_fetch(fetch: Fetch, name: str) -> Callable[[], torch.Tensor]:
    return lambda: fetch(name)


class StoredModel:
    """The tensors of a model found in published files.

    Attributes:
        joined: Source of each tensor of the model, by canonical name.
        missing: Canonical names of the tensors that the files lack. Heads and blocks that an
            objective adds may be new.
        differing: Tensors whose shape differs from the model's, in words.
        unreadable: Tensors stored in a type that cannot be read as weights, such as quantized ones.
        unused: Names in the files that match no tensor of the model.
    """

    def __init__(self, model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
        self._model, self._stored = model, stored
        state = model.state_dict()
        groups, self.unused = _group_tensors(model, stored, state)
        wanted = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items()}
        self.joined: dict[str, ConvertedTensors] = {}
        self.differing: list[str] = []
        self.unreadable = [
            f"{name} in {tensor.dtype}"
            for name, tensor in stored.items()
            if tensor.dtype not in READABLE and name not in self.unused
        ]
        for group in groups:
            for name, shape in self._shapes(group).items():
                self.joined[name] = group
                if shape != wanted.get(name, shape):
                    self.differing.append(
                        _shape_difference(name, group, shape, wanted[name], stored)
                    )
        for name, others in tied_names(model).items():
            for other in others:
                if other in self.joined and self.joined[other].converter is None:
                    self.joined.setdefault(name, self.joined[other])
        self.missing = [name for name in wanted if name not in self.joined and not may_be_new(name)]

    @property
    def problems(self) -> list[str]:
        """Reasons why the files do not match the model, in words; empty if they match."""
        said = []
        if self.missing:
            said.append(f"has no tensor {join_first(self.missing)}")
        if self.differing:
            said.append(join_first(self.differing))
        if self.unreadable:
            said.append(f"quantised weights are not read: {join_first(self.unreadable)}")
        return said

    def _shapes(self, group: ConvertedTensors) -> dict[str, tuple[int, ...]]:
        """Return the shapes that a group's conversion gives, by running it on meta tensors.

        If the conversion fails, the failure is added to `differing`.
        """
        if group.converter is None:
            return {group.first: self._stored[group.names[0]].shape}

        def empty(name: str) -> torch.Tensor:
            return torch.empty(self._stored[name].shape, device="meta")

        try:
            made = group.convert(self._model, empty)
            shapes = {name: tuple(value.shape) for name, value in made.items()}
            group.by_row = len(shapes) == 1 and _is_by_row(group, *shapes.values())
        except (RuntimeError, ValueError, IndexError, AttributeError) as error:
            said = str(error).splitlines()[0] if str(error) else type(error).__name__
            file = self._stored[group.names[0]].file
            self.differing.append(
                f"{group.first} cannot be made of {group.names[0]} in {file}: {said}"
            )
            return {group.first: tuple(self._model.state_dict()[group.first].shape)}
        return shapes


def _group_tensors(
    model: PreTrainedModel, stored: Iterable[str], state: dict[str, Any]
) -> tuple[list[ConvertedTensors], list[str]]:
    """Return the files' tensors grouped by what they become, and the names that become nothing.

    Follows `convert_and_load_state_dict_in_model` of transformers.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    groups: dict[str, ConvertedTensors] = {}
    unused: list[str] = []
    prefix = model.base_model_prefix
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if renamed not in state:
            unused.append(name)
        elif pattern is None:
            groups[renamed] = ConvertedTensors(renamed, None, {"": [name]})
        else:
            group = groups.setdefault(renamed, ConvertedTensors(renamed, by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(name)
    for group in groups.values():
        if group.converter is not None:  # an expert's tensors have its index in each list
            order = group.converter.source_patterns
            group.sources = dict(
                sorted(group.sources.items(), key=lambda item: order.index(item[0]))
            )
    return list(groups.values()), unused


def _is_by_row(group: ConvertedTensors, shape: tuple[int, ...]) -> bool:
    """Return True if each tensor of the files is a part of one row of the result."""
    assert group.converter is not None
    first, *others = group.converter.operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0
    apart = all(map(_leaves_rows, others))
    return stacks and apart and all(len(names) == shape[0] for names in group.sources.values())


def _leaves_rows(operation: ConversionOps) -> bool:
    """Return True if an operation computes each row of its result from one row of its input."""
    if isinstance(operation, Chunk | Concatenate):
        return bool(operation.dim > 0)
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0


def _shape_difference(
    name: str,
    group: ConvertedTensors,
    shape: tuple[int, ...],
    wanted: tuple[int, ...],
    stored: Mapping[str, StoredTensor],
) -> str:
    first = group.names[0]
    of = first if first == name else f"{name}, of {first}"
    count = f" and {len(group.names) - 1:,} others" if len(group.names) > 1 else ""
    return (
        f"{of}{count} in {stored[first].file}, has shape {list(shape)}, "
        f"the model's is {list(wanted)}"
    )


Read = Callable[[str, int, int], torch.Tensor]
"""Reader of elements [start, end) of a flattened tensor of the model, by its canonical name."""

_PIECE = 1 << 20
"""Elements read at a time of a tensor that is written unchanged."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are written to a file one after the other."""

    shapes: dict[str, tuple[int, ...]]
    """Shapes by the names in the files."""
    dtype: torch.dtype | None
    """Type of a buffer, which keeps its own; None for the file's type."""
    pieces: Callable[[Read], Iterator[torch.Tensor]]
    """Yields the elements of the tensors in the order of `shapes`, flat."""

    @property
    def numel(self) -> int:
        return sum(map(prod, self.shapes.values()))


def published_units(model: PreTrainedModel) -> Iterator[Unit]:
    """Yield a model's tensors as they are published, each once."""
    # The transforms that transformers' `revert_weight_conversion` uses for a model it did not load.
    transforms = get_model_conversion_mapping(model, add_legacy=False)[::-1]
    kept = [item.reverse_transform() for item in transforms if not isinstance(item, PrefixChange)]
    renamings = [item for item in kept if isinstance(item, WeightRenaming)]
    converters = [item for item in kept if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    parameters = dict(model.named_parameters())
    groups: dict[str, _Group] = {}
    for name, tensor in canonical_tensors(model).items():
        if name.startswith(f"{FUTURE}."):  # transformers would not load them with these classes
            continue
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            written = apply_renamings(name, renamings)
            yield _plain_unit(name, written, tensor, None if name in parameters else tensor.dtype)
        else:
            made = _Group(model, renamed, by_pattern[pattern], renamings, [])
            groups.setdefault(renamed, made).sources.append((pattern, name, tensor.shape))
    for group in groups.values():
        yield from group.units()


def _plain_unit(name: str, written: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Unit:
    count = tensor.numel()

    def pieces(read: Read) -> Iterator[torch.Tensor]:
        for start in range(0, count, _PIECE):
            yield read(name, start, min(start + _PIECE, count))

    return Unit({written: tuple(tensor.shape)}, dtype, pieces)


@dataclass(frozen=True, slots=True)
class _Group:
    """Tensors of the model that one conversion turns into published tensors."""

    model: PreTrainedModel
    first: str
    converter: WeightConverter
    renamings: list[WeightRenaming]
    sources: list[tuple[str, str, torch.Size]]
    """Pattern in the conversion, canonical name and shape of each tensor."""

    def units(self) -> Iterator[Unit]:
        whole = self._convert([torch.empty(shape, device="meta") for *_, shape in self.sources])
        shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
        rows = self._rows(list(shapes))
        if rows is None:
            yield Unit(shapes, None, self._converted_unit)
            return
        for row, names in enumerate(rows):
            yield Unit({name: shapes[name] for name in names}, None, self._of_row(row))

    def _convert(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for (pattern, name, _), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        made = converter.convert(self.first, model=self.model, config=self.model.config)
        return {
            apply_renamings(name, self.renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    def _rows(self, names: list[str]) -> list[list[str]] | None:
        """Return the published names of each row (expert); None if rows are not separable."""
        *others, last = self.converter.operations
        apart = isinstance(last, SplitModulelist) and last.dim == 0 and len(self.sources) == 1
        if not (apart and all(map(_leaves_rows, others))):
            return None
        (_, _, shape), *_ = self.sources
        first = list(self._convert([torch.empty((1, *shape[1:]), device="meta")]))
        found = [names[row :: shape[0]] for row in range(shape[0])]
        return found if found[0] == first else None

    def _of_row(self, row: int) -> Callable[[Read], Iterator[torch.Tensor]]:
        def pieces(read: Read) -> Iterator[torch.Tensor]:
            (_, name, shape), *_ = self.sources
            size = prod(shape[1:])
            values = read(name, row * size, (row + 1) * size).view(1, *shape[1:])
            for tensor in self._convert([values]).values():
                yield tensor.reshape(-1)

        return pieces

    def _converted_unit(self, read: Read) -> Iterator[torch.Tensor]:
        tensors = [read(name, 0, shape.numel()).view(shape) for _, name, shape in self.sources]
        for tensor in self._convert(tensors).values():
            yield tensor.reshape(-1)
