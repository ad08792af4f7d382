"""Conversion of published files to a model's tensors, whose names may differ.

transformers renames and joins what it loads: for instance, one tensor per expert on disk becomes
one tensor for all experts. transformers' own conversions are matched to the names in the files and
run on meta tensors. So names and shapes are known to be right before a value is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.models.safetensors_files import READABLE, StoredTensor, some
from trainctl.train.models.tensors import canonical_tensors, names_of_tied

Fetch = Callable[[str], torch.Tensor]
"""Reader of a tensor of the files, by its name there."""


@dataclass(slots=True)
class Converted:
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
                converter.add_tensor(self.first, name, pattern, _later(fetch, name))
        made = converter.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def _later(fetch: Fetch, name: str) -> Callable[[], torch.Tensor]:
    return lambda: fetch(name)


class StoredModel:
    """The tensors of a model found in published files.

    Attributes:
        joined: Source of each tensor of the model, by canonical name.
        missing: Canonical names of the tensors that the files lack.
        differing: Tensors whose shape differs from the model's, in words.
        unreadable: Tensors stored in a type that cannot be read as weights, such as quantized ones.
        unused: Names in the files that match no tensor of the model.
    """

    def __init__(self, model: PreTrainedModel, stored: Mapping[str, StoredTensor]) -> None:
        self._model, self._stored = model, stored
        state = model.state_dict()
        groups, self.unused = _grouped(model, stored, state)
        wanted = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items()}
        self.joined: dict[str, Converted] = {}
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
                    self.differing.append(_differs(name, group, shape, wanted[name], stored))
        for name, others in names_of_tied(model).items():
            for other in others:
                if other in self.joined and self.joined[other].converter is None:
                    self.joined.setdefault(name, self.joined[other])
        self.missing = [name for name in wanted if name not in self.joined]

    @property
    def problems(self) -> list[str]:
        """Reasons why the files do not match the model, in words; empty if they match."""
        said = []
        if self.missing:
            said.append(f"has no tensor {some(self.missing)}")
        if self.differing:
            said.append(some(self.differing))
        if self.unreadable:
            said.append(f"quantised weights are not read: {some(self.unreadable)}")
        return said

    def _shapes(self, group: Converted) -> dict[str, tuple[int, ...]]:
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


def _grouped(
    model: PreTrainedModel, stored: Iterable[str], state: dict[str, Any]
) -> tuple[list[Converted], list[str]]:
    """Return the files' tensors grouped by what they become, and the names that become nothing.

    Follows `convert_and_load_state_dict_in_model` of transformers.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    groups: dict[str, Converted] = {}
    unused: list[str] = []
    prefix = model.base_model_prefix
    for name in sorted(stored, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if renamed not in state and name in state:
            renamed, pattern = name, None
        if renamed not in state:
            unused.append(name)
        elif pattern is None:
            groups[renamed] = Converted(renamed, None, {"": [name]})
        else:
            group = groups.setdefault(renamed, Converted(renamed, by_pattern[pattern]))
            group.sources.setdefault(pattern, []).append(name)
    for group in groups.values():
        if group.converter is not None:  # an expert's tensors have its index in each list
            order = group.converter.source_patterns
            group.sources = dict(
                sorted(group.sources.items(), key=lambda item: order.index(item[0]))
            )
    return list(groups.values()), unused


def _is_by_row(group: Converted, shape: tuple[int, ...]) -> bool:
    """Return True if each tensor of the files is a part of one row of the result."""
    assert group.converter is not None
    first, *others = group.converter.operations
    stacks = isinstance(first, MergeModulelist) and first.dim == 0
    apart = all(map(_leaves_rows, others))
    return stacks and apart and all(len(names) == shape[0] for names in group.sources.values())


def _leaves_rows(operation: ConversionOps) -> bool:
    if isinstance(operation, Concatenate):
        return operation.dim > 0
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0


def _differs(
    name: str,
    group: Converted,
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
