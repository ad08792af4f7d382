"""How a model's tensors are made of those of published files, whose names are others.

transformers renames and joins what it loads: one tensor an expert on disk is one tensor for all of
them in memory. The same transforms, transformers' own, are held against the names in the files, and
run on tensors without values: so names and shapes are known to be right before a value is read.
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

from trainctl.config.safetensors_files import READABLE, StoredTensor, some
from trainctl.train.models.tensors import canonical_tensors, names_of_tied

Fetch = Callable[[str], torch.Tensor]
"""A tensor of the files, by its name there."""


@dataclass(slots=True)
class Converted:
    """Tensors of the files that become one or several of the model's."""

    first: str
    """The first tensor of the model that they become."""
    converter: WeightConverter | None
    """transformers' operations on them; None takes the one that there is as it is."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Their names in the files, by the converter's pattern, in its order."""
    by_row: bool = False
    """Whether a row of what they become, an expert, is made of the tensors at its place."""

    @property
    def names(self) -> list[str]:
        return [name for listed in self.sources.values() for name in listed]

    def convert(
        self, model: PreTrainedModel, fetch: Fetch, row: int | None = None
    ) -> dict[str, torch.Tensor]:
        """Return the model's tensors of these files' tensors; of one row of them alone if one is
        given."""
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
    """What files hold of a model, by the model's own names.

    Attributes:
        joined: What each tensor of the model that the files have is made of.
        missing: Tensors of the model, canonical names, that they do not have.
        differing: What of them has another shape than the model's, in words.
        unreadable: What is stored in a type whose elements are not the weights.
        unused: Names in the files that the model has no place for.
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
        """Why these are not the model's weights, in words; empty if they are."""
        said = []
        if self.missing:
            said.append(f"has no tensor {some(self.missing)}")
        if self.differing:
            said.append(some(self.differing))
        if self.unreadable:
            said.append(f"quantised weights are not read: {some(self.unreadable)}")
        return said

    def _shapes(self, group: Converted) -> dict[str, tuple[int, ...]]:
        """What a group makes, by running it on tensors without values; none where it fails."""
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
    """Return names of files, by what they become; and those that become nothing.

    As `convert_and_load_state_dict_in_model` of transformers sorts them.
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
        if group.converter is not None:  # an expert's tensors lie at its place in each list
            order = group.converter.source_patterns
            group.sources = dict(
                sorted(group.sources.items(), key=lambda item: order.index(item[0]))
            )
    return list(groups.values()), unused


def _is_by_row(group: Converted, shape: tuple[int, ...]) -> bool:
    """Whether each tensor of the files is a part of one row of the result."""
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
