"""Initialisation laws of a model's parameters, recorded from its own code without drawing values.

transformers' `_init_weights` runs on meta parameters, and the in-place operations on each of them
are recorded: normal with a standard deviation, zero, one. So a router, an attention sink, an
expert bias or a norm whose weight is an offset from one starts as its class says, whatever its
name.
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
"""Elementwise in-place operations that may follow a draw; a truncated normal is made of them."""


class NonShardableInit(TrainctlError):
    """Error: an initialisation cannot be repeated for a part of its parameter."""

    def __init__(self, name: str, operation: str) -> None:
        self.name = name
        super().__init__(
            f"the model's own code starts {name} by {operation}, which cannot be done for a part "
            "of it by itself",
            hint="start from weights: model.initial_weights=DIR",
        )


NORMAL = "aten::normal_"


@dataclass(frozen=True, slots=True)
class Initializer:
    """Initialisation of a range of elements: in-place operations in order."""

    operations: tuple[tuple[Any, tuple[Any, ...]], ...]
    """Each operation with its arguments after the tensor."""

    @property
    def is_random(self) -> bool:
        return self.operations[0][0].name() in RANDOM

    @property
    def named(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The operations with their names in place of the operators, for hashing."""
        return [(operation.name(), args) for operation, args in self.operations]

    def draw(self, values: torch.Tensor, generator: torch.Generator, factor: float) -> None:
        """Fill `values` by this law.

        Args:
            generator: Generator of the random operation, if there is one.
            factor: Factor on random values; of a plain normal, on its standard deviation.
        """
        (first, args), *others = self.operations
        is_plain = first.name() == NORMAL and not others
        if is_plain:  # draw with the scaled deviation; do not scale a draw
            mean, std = args or (0.0, 1.0)
            args = (mean, std * factor)
        first(values, *args, **({"generator": generator} if self.is_random else {}))
        for operation, further in others:
            operation(values, *further)
        if self.is_random and not is_plain and factor != 1:
            values.mul_(factor)

    def constant(self) -> float:
        """Return the value that a law without random operations gives every element."""
        value = torch.empty(1)
        for operation, args in self.operations:
            operation(value, *args)
        return float(value)


ZERO = Initializer(((torch.ops.aten.zero_.default, ()),))
ONE = Initializer(((torch.ops.aten.fill_.Scalar, (1.0,)),))


def normal(std: float) -> Initializer:
    """Return the law of a normal distribution around zero."""
    return Initializer(((torch.ops.aten.normal_.default, (0.0, std)),))


@dataclass(frozen=True, slots=True)
class InitializedRange:
    """Elements [start, stop) of a flattened parameter that share one law."""

    start: int
    stop: int
    law: Initializer


Initializers = dict[str, list[InitializedRange]]
"""Stretches of each parameter that the model's own code initialises. Later ones override earlier
ones.
"""


def parameter_initializers(model: PreTrainedModel) -> Initializers:
    """Return the initialisation laws of a whole skeleton, by canonical name.

    Args:
        model: The skeleton, with its parameters on the meta device.

    Raises:
        NonShardableInit: Operations that make a parameter cannot be repeated for a part of it.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    recorder = _Recorder(names)
    head = model.get_output_embeddings()
    is_tied = head is not None and names[head.weight] != _path(model, head)
    with torch.no_grad(), recorder:
        for owner, module in _innermost_first(model, model):
            if not (is_tied and module is head):  # a tied head starts as the embedding
                owner._init_weights(module)
    return recorder.laws


def _path(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module's weight."""
    return next(f"{path}.weight" for path, module in model.named_modules() if module is wanted)


def _innermost_first(
    module: nn.Module, owner: PreTrainedModel
) -> Iterator[tuple[PreTrainedModel, nn.Module]]:
    """Yield each module with the model that initialises it, in the order of transformers."""
    for child in module.children():
        yield from _innermost_first(child, child if isinstance(child, PreTrainedModel) else owner)
    yield owner, module


class SkipInit(TorchDispatchMode):
    """Dispatch mode that skips the initialisation of meta parameters.

    Without it, torch runs these operations through Python decompositions, some milliseconds for
    each.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _done(func, args, kwargs)


class _Recorder(TorchDispatchMode):
    """Dispatch mode that records the in-place operations on meta parameters in `laws`."""

    def __init__(self, names: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self.laws: Initializers = {}
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
            raise NonShardableInit(name, func.name())
        step = (func, args)
        if func.name() in RANDOM + CONSTANT:
            if target.numel() == whole.numel():
                stretches.clear()
            stretches.append(InitializedRange(start, stop, Initializer((step,))))
            return
        last = stretches[-1] if stretches else None
        is_same = last is not None and (last.start, last.stop) == (start, stop)
        if func.name() not in FURTHER or last is None or not is_same:
            raise NonShardableInit(name, func.name())
        stretches[-1] = InitializedRange(start, stop, Initializer((*last.law.operations, step)))


def _done(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation. An initialisation in place on a meta tensor only returns its target."""
    if func.name() in RANDOM + CONSTANT and args[0].is_meta:
        return args[0]
    return func(*args, **(kwargs or {}))


def _repeatable(args: tuple[Any, ...]) -> bool:
    return all(arg is None or isinstance(arg, int | float) for arg in args)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
