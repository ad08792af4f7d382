"""Tensor and pipeline cuts of a module that is not of transformers, by its own plans.

`tensor_plan()` maps patterns of names to the words of transformers' `base_model_tp_plan`. Unlike
transformers' plans it needs no regions: each `colwise` layer sums the gradient of its input over
the tensor ranks, each `rowwise` layer its output, so any code may stand between them that treats
channels or heads one by one. `pipeline_plan()` lists the parts in the order of the forward pass.
`trainctl.train.models.module_layouts` checks both before the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainctl.engines.process import Axis
from trainctl.errors import TrainctlError
from trainctl.train.adapters.layers import DoraLayer, LoraLayer
from trainctl.train.models.module import ModuleModel
from trainctl.train.parallel.experts import Copy, Reduce, ReduceScatter


class RowLinear(nn.Linear):
    """Linear layer split by inputs: the ranks' products are summed, then the bias is added."""

    axis: Axis
    sequence_sharded: bool

    def product(self, input: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product."""
        return F.linear(input, self.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = _reduce_output(self.product(input), self.axis, self.sequence_sharded)
        return output if self.bias is None else output + self.bias


class RowConv1D(Conv1D):
    """gpt2's Conv1D split by inputs; its weight is (inputs, outputs)."""

    axis: Axis
    sequence_sharded: bool

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product."""
        return x @ self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _reduce_output(self.product(x), self.axis, self.sequence_sharded) + self.bias


class LoraRow(LoraLayer):
    """LoRA mixin of a layer split by inputs, placed before the layer's class.

    A is split by inputs, B is whole.
    """

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the product, with the adapter's part."""
        plain: torch.Tensor = super().product(inputs)  # type: ignore[misc]
        return plain + self.added(self.dropped(inputs))


class DoraRow(DoraLayer):
    """DoRA mixin of a layer split by inputs; row lengths are taken over all ranks' parts."""

    axis: Axis

    def lengths(self, merged: torch.Tensor) -> torch.Tensor:
        squares = merged.float().square().sum(dim=1)
        dist.all_reduce(squares, group=self.axis.group)
        return squares.sqrt().to(merged.dtype)

    def product(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the scaled product."""
        plain: torch.Tensor = super().product(inputs)  # type: ignore[misc]
        weight = self.weight.T if isinstance(self, Conv1D) else self.weight
        return self.scaled(plain, inputs, weight)


def row_class(row: nn.Module, kind: type) -> type:
    """Return the class of a layer split by inputs, with the mixin of its adapter if it has one."""
    if not isinstance(row, LoraLayer):
        return kind
    adapter = DoraRow if isinstance(row, DoraLayer) else LoraRow
    return type(kind.__name__, (adapter, kind), {})


def _reduce_output(partial: torch.Tensor, axis: Axis, sequence_sharded: bool) -> torch.Tensor:
    leave = ReduceScatter if sequence_sharded else Reduce
    return leave.apply(partial, axis)


COLUMN, ROW, SHARED = "colwise", "rowwise", "replicated_with_grad_allreduce"
STYLES = (COLUMN, ROW, SHARED)


@dataclass(frozen=True, slots=True)
class Place:
    """A layer, parameter or whole number of a module that a pattern of its plan names."""

    name: str
    owner: nn.Module
    """The module that has it as an attribute."""
    key: str
    """Name of the attribute."""

    @property
    def value(self) -> Any:
        return getattr(self.owner, self.key)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """Parts that the `tensor_plan()` of a module names."""

    columns: tuple[Place, ...]
    """Linear layers split by outputs."""
    rows: tuple[Place, ...]
    """Linear layers split by inputs."""
    values: tuple[Place, ...]
    """Parameters split along their first dimension."""
    widths: tuple[Place, ...]
    """Attributes that hold a number of heads or channels, which is divided by the ranks."""
    shared: tuple[nn.Parameter, ...]
    """Parameters that every rank holds whole and uses for its own heads or channels only."""
    unmatched: tuple[str, ...]
    """Patterns that name nothing."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that the number of tensor ranks must divide, by name."""
        found = {place.name: place.value.out_features for place in self.columns}
        found |= {place.name: place.value.in_features for place in self.rows}
        found |= {place.name: place.value.shape[0] for place in self.values}
        return found | {place.name: place.value for place in self.widths}

    @property
    def cut_parameters(self) -> set[nn.Parameter]:
        """Parameters that ranks hold a part of."""
        found = {place.value.weight for place in (*self.columns, *self.rows)}
        found |= {place.value.bias for place in self.columns if place.value.bias is not None}
        return found | {place.value for place in self.values}


def read_tensor_plan(module: nn.Module) -> TensorPlan:
    """Return what the module's `tensor_plan()` names in it.

    Raises:
        TrainctlError: The plan has an unknown word, names a part twice, or names a part that cannot
            be cut.
    """
    styles = _plan_of(module, "tensor_plan")
    if not isinstance(styles, Mapping):
        raise TrainctlError("tensor_plan() gives no mapping of patterns of names to words")
    unknown = {str(style) for style in styles.values()} - set(STYLES)
    if unknown:
        raise TrainctlError(
            f"tensor_plan() says {', '.join(sorted(unknown))}; it may say {', '.join(STYLES)}"
        )
    places = tuple(_places(module))
    taken: dict[str, str] = {}
    parts: dict[str, list[Place]] = {
        name: [] for name in ("columns", "rows", "values", "widths", "shared")
    }
    unmatched = []
    for pattern, style in styles.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        named = [place for place in places if expression.fullmatch(place.name)]
        if not named:
            unmatched.append(pattern)
        for place in named:
            if place.name in taken:
                raise TrainctlError(
                    f"tensor_plan() names {place.name} twice: {taken[place.name]} and {pattern}"
                )
            taken[place.name] = pattern
            parts[_part_of_plan(place, style)].append(place)
    shared = [tuple(_parameters_of(place)) for place in parts.pop("shared")]
    return TensorPlan(
        **{name: tuple(found) for name, found in parts.items()},
        shared=tuple(parameter for each in shared for parameter in each),
        unmatched=tuple(unmatched),
    )


def _plan_of(module: nn.Module, name: str) -> Any:
    made = getattr(module, name, None)
    if made is None:
        raise TrainctlError(f"{type(module).__name__} has no {name}()")
    return made()


def _places(module: nn.Module) -> Iterator[Place]:
    """Yield what a plan may name: submodules, parameters, and whole numbers."""
    for path, owner in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        own: dict[str, Any] = {**owner._modules, **owner._parameters}
        own |= {key: value for key, value in vars(owner).items() if type(value) is int}
        for key, value in own.items():
            if value is not None:
                yield Place(prefix + key, owner, key)


def _part_of_plan(place: Place, style: str) -> str:
    """Return the field of `TensorPlan` that a place belongs to."""
    value = place.value
    if style == SHARED and not isinstance(value, int):
        return "shared"
    if isinstance(value, nn.Linear) and style == COLUMN:
        return "columns"
    if type(value) is nn.Linear and style == ROW:  # a subclass would lose its own forward
        return "rows"
    if style == COLUMN and isinstance(value, nn.Parameter) and value.dim() > 0:
        return "values"
    if style == COLUMN and isinstance(value, int):
        return "widths"
    raise TrainctlError(
        f"tensor_plan() says {style} of {place.name}, a {_kind_of(value)}: "
        f"{COLUMN} cuts nn.Linear, parameters and whole numbers, {ROW} cuts nn.Linear"
    )


def _kind_of(value: Any) -> str:
    return "parameter" if isinstance(value, nn.Parameter) else type(value).__name__


def _parameters_of(place: Place) -> Iterator[nn.Parameter]:
    if isinstance(place.value, nn.Parameter):
        yield place.value
    else:
        yield from place.value.parameters()


def vocabulary_layers(model: ModuleModel) -> tuple[Any, ...]:
    """Return the layers that tensor ranks split by tokens: embedding and head, if they are here."""
    inside = {module for block in model.own_blocks() for module in block.modules()}
    found = (model.get_input_embeddings(), model.get_output_embeddings())
    return tuple(layer for layer in found if layer is not None and layer not in inside)


def cut_module(model: ModuleModel, shards: Any, axis: Axis) -> None:
    """Cut what the module's `tensor_plan()` names to this rank's part.

    Args:
        shards: `cut` replaces a parameter by a part of it, `keep` keeps it whole.
    """
    plan = read_tensor_plan(model.module)
    copies = _SharedCopies(axis)
    for place in plan.columns:
        layer = place.value
        shards.cut(layer, "weight", dim=0)
        shards.cut(layer, "bias", dim=0)
        layer.out_features //= axis.size
        layer.register_forward_pre_hook(copies.enter)
    for place in plan.rows:
        layer = place.value
        shards.cut(layer, "weight", dim=1)
        layer.in_features //= axis.size
        layer.__class__ = RowLinear  # in place: the parameters keep their names
        layer.axis, layer.sequence_sharded = axis, False
    for place in plan.values:
        shards.cut(place.owner, place.key, dim=0)
    for place in plan.widths:
        setattr(place.owner, place.key, place.value // axis.size)
    for parameter in plan.shared:
        shards.keep(parameter, partial=True)
    for block in model.own_blocks():
        block.register_forward_hook(copies.forget)


@dataclass(slots=True)
class _SharedCopies:
    """Inputs of column layers: layers with the same input share one sum of its gradient."""

    axis: Axis
    _last: tuple[Any, Any] = field(default=(None, None))

    def enter(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Replace the input by a copy whose gradient is summed (a forward pre-hook)."""
        source, copied = self._last
        if source is not args[0]:
            copied = Copy.apply(args[0], self.axis)
            self._last = args[0], copied
        return (copied, *args[1:])

    def forget(self, *_: Any) -> None:
        """Release the tensors, and let no other pass use them (a forward hook of a block)."""
        self._last = None, None


def read_pipeline_plan(model: ModuleModel) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    """Return the parts before the blocks, the name of the blocks' list, and the parts after them.

    Raises:
        TrainctlError: `pipeline_plan()` does not list the module's own parts around its blocks.
    """
    module = model.module
    order = _plan_of(module, "pipeline_plan")
    if isinstance(order, str) or not isinstance(order, Sequence):
        raise TrainctlError("pipeline_plan() gives no sequence of names")
    names = tuple(map(str, order))
    children = dict(module.named_children())
    strange = [name for name in names if name not in children]
    if strange:
        raise TrainctlError(
            f"pipeline_plan() names {strange[0]}, which is no part of {type(module).__name__} "
            f"({', '.join(children)})"
        )
    lists = [name for name in names if isinstance(children[name], nn.ModuleList)]
    if len(lists) != 1 or list(children[lists[0]]) != model.own_blocks():
        raise TrainctlError(
            "pipeline_plan() has to name the one nn.ModuleList that holds what blocks() gives"
        )
    place = names.index(lists[0])
    return names[:place], lists[0], names[place + 1 :]


def cut_module_to_stage(model: ModuleModel, blocks: Sequence[int], axis: Axis) -> None:
    """Cut a whole module to a stage: its blocks, the first and the last stage's other parts."""
    before, middle, after = read_pipeline_plan(model)
    module = model.module
    held = getattr(module, middle)
    setattr(module, middle, nn.ModuleList(held[block] for block in blocks))
    for name in (*(() if axis.is_first else before), *(() if axis.is_last else after)):
        setattr(module, name, PassThrough())


class PassThrough(nn.Module):
    """Stand-in for a part of another stage: it gives its first argument."""

    def forward(self, first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return first
