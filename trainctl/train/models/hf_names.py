"""Names and layout of a model's tensors in published files.

transformers' conversions of published files are applied in reverse: for instance, one tensor for
all experts becomes one tensor per expert again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    ConversionOps,
    PrefixChange,
    SplitModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    apply_converters,
    apply_renamings,
)
from transformers.modeling_utils import PreTrainedModel

from trainctl.train.models.tensors import canonical_tensors

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
        renamed, pattern = apply_converters(name, converters)
        if pattern is None:
            written = apply_renamings(name, renamings)
            yield _plain(name, written, tensor, None if name in parameters else tensor.dtype)
        else:
            made = _Group(model, renamed, by_pattern[pattern], renamings, [])
            groups.setdefault(renamed, made).sources.append((pattern, name, tensor.shape))
    for group in groups.values():
        yield from group.units()


def _plain(name: str, written: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Unit:
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
            yield Unit(shapes, None, self._all)
            return
        for row, names in enumerate(rows):
            yield Unit({name: shapes[name] for name in names}, None, self._of_row(row))

    def _convert(self, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for (pattern, name, _), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)  # type: ignore[arg-type]
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

    def _all(self, read: Read) -> Iterator[torch.Tensor]:
        tensors = [read(name, 0, shape.numel()).view(shape) for _, name, shape in self.sources]
        for tensor in self._convert(tensors).values():
            yield tensor.reshape(-1)


def _leaves_rows(operation: ConversionOps) -> bool:
    if isinstance(operation, Chunk):
        return operation.dim > 0
    return isinstance(operation, Transpose) and min(operation.dim0, operation.dim1) > 0
