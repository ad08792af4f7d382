"""How a model's own code draws its initial values, learnt without drawing any.

transformers' `_init_weights` is run on parameters without values, and what it does to each of them
is taken down: normal with that deviation, zero, one. So a router, a sink, a bias of experts or a
norm that counts from zero starts as its class says, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import PreTrainedModel

from trainctl.errors import TrainctlError

RANDOM = ("aten::normal_", "aten::uniform_", "aten::exponential_", "aten::bernoulli_.float")
CONSTANT = ("aten::zero_", "aten::fill_.Scalar")
FURTHER = (
    "aten::mul_.Scalar",
    "aten::mul_.Tensor",
    "aten::div_.Scalar",
    "aten::div_.Tensor",
    "aten::add_.Scalar",
    "aten::add_.Tensor",
    "aten::sub_.Scalar",
    "aten::sub_.Tensor",
    "aten::erfinv_",
    "aten::clamp_",
    "aten::exp_",
    "aten::log_",
    "aten::neg_",
    "aten::abs_",
)
"""Operations in place that change each element by itself: a truncated normal is made of such."""


class NotInParts(TrainctlError):
    """A parameter is made by an operation that cannot be repeated for a part of it.

    Args:
        name: Its canonical name.
        operation: What is done to it.
    """

    def __init__(self, name: str, operation: str) -> None:
        self.name = name
        super().__init__(
            f"the model's own code starts {name} by {operation}, which cannot be done for a part "
            "of it by itself",
            hint="start from weights: model.initial_weights=DIR",
        )


NORMAL = "aten::normal_"


@dataclass(frozen=True, slots=True)
class Law:
    """How elements start: operations in place, one after the other."""

    operations: tuple[tuple[Any, tuple[Any, ...]], ...]
    """Each with its arguments after the tensor."""

    @property
    def is_random(self) -> bool:
        return self.operations[0][0].name() in RANDOM

    @property
    def named(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The operations by their names."""
        return [(operation.name(), args) for operation, args in self.operations]

    def draw(self, values: torch.Tensor, generator: torch.Generator, factor: float) -> None:
        """Fill a tensor by a generator.

        Args:
            generator: Of what is random.
        """
        (first, args), *others = self.operations
        is_plain = first.name() == NORMAL and not others
        if is_plain:  # normals of that deviation, not multiples of others
            mean, std = args or (0.0, 1.0)
            args = (mean, std * factor)
        first(values, *args, **({"generator": generator} if self.is_random else {}))
        for operation, further in others:
            operation(values, *further)
        if self.is_random and not is_plain and factor != 1:
            values.mul_(factor)

    def constant(self) -> float:
        """Return the one value of elements that are not random."""
        value = torch.empty(1)
        for operation, args in self.operations:
            operation(value, *args)
        return float(value)


ZERO = Law(((torch.ops.aten.zero_.default, ()),))
ONE = Law(((torch.ops.aten.fill_.Scalar, (1.0,)),))


def normal(std: float) -> Law:
    """Around zero."""
    return Law(((torch.ops.aten.normal_.default, (0.0, std)),))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Elements [start, stop) of a flattened parameter that start by one law."""

    start: int
    stop: int
    law: Law


Laws = dict[str, list[Stretch]]
"""Of each parameter that a model's own code initialises: a later one holds over an earlier."""


def initial_laws(model: PreTrainedModel) -> Laws:
    """Return how the parameters of a whole skeleton start, by canonical name.

    Args:
        model: With its parameters on the meta device.

    Raises:
        NotInParts: A parameter is made by operations that cannot be repeated for a part of it.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    recorder = _Recorder(names)
    head = model.get_output_embeddings()
    is_tied = head is not None and names[head.weight] != _path(model, head)
    with torch.no_grad(), recorder:
        for owner, module in _innermost_first(model, model):
            if not (is_tied and module is head):  # it is the embedding, and starts as that
                owner._init_weights(module)
    return recorder.laws


def _path(model: nn.Module, wanted: nn.Module) -> str:
    """Name of the weight of a module."""
    return next(f"{path}.weight" for path, module in model.named_modules() if module is wanted)


def _innermost_first(
    module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield each module with the model that initialises it, in the order of transformers."""
    for child in module.children():
        yield from _innermost_first(child, child if isinstance(child, PreTrainedModel) else owner)
    yield owner, module


class Undrawn(TorchDispatchMode):
    """Within it, parameters without values are not drawn: in torch nothing is done to them, but by
    way of Python, at some milliseconds for each."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs)


class _Recorder(TorchDispatchMode):
    """Within it, what is done in place to parameters without values.

    Attributes:
        laws: What was done to each, by name.
    """

    def __init__(self, names: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self.laws: Laws = {}
        self._known = {_storage(parameter): (name, parameter) for parameter, name in names.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = _done(func, args, kwargs)
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor):
            found = self._known.get(_storage(target))
            if found is not None:
                self._note(*found, target, func, args[1:])
        return output

    def _note(
        self, name: str, whole: nn.Parameter, target: torch.Tensor, func: Any, args: tuple[Any, ...]
    ) -> None:
        start, stop = target.storage_offset(), target.storage_offset() + target.numel()
        stretches = self.laws.setdefault(name, [])
        if not _repeatable(args) or not target.is_contiguous():
            raise NotInParts(name, func.name())
        step = (func, args)
        if func.name() in RANDOM + CONSTANT:
            if target.numel() == whole.numel():
                stretches.clear()
            stretches.append(Stretch(start, stop, Law((step,))))
            return
        last = stretches[-1] if stretches else None
        is_same = last is not None and (last.start, last.stop) == (start, stop)
        if func.name() not in FURTHER or last is None or not is_same:
            raise NotInParts(name, func.name())
        stretches[-1] = Stretch(start, stop, Law((*last.law.operations, step)))


def _done(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation puts out, which in place and without values is what it was given."""
    if func.name() in RANDOM + CONSTANT and args[0].is_meta:
        return args[0]
    return func(*args, **(kwargs or {}))


def _repeatable(args: tuple[Any, ...]) -> bool:
    return all(arg is None or isinstance(arg, int | float) for arg in args)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
