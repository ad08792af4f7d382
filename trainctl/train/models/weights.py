"""Sources of parameter values: a directory of safetensors, or the seed.

A source gives any range of any parameter, so a rank that holds a shard computes or reads only that
shard. Initial values follow the laws of the model's own code: transformers' `_init_weights` runs on
meta parameters, and the in-place operations on each of them are recorded. So a router, an attention
sink, an expert bias or a norm whose weight is an offset from one starts as its class says.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import initialization
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.models.hf_weights import ConvertedTensors, StoredModel
from trainctl.models.tensors import stored_tensors
from trainctl.plans import mup

CHUNK = 1 << 16
"""Elements drawn from one generator; part of what a seed means, so never change it."""


class WeightSource(Protocol):
    """Source of a model's tensors, by canonical name."""

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a flattened parameter, at least one; fp32 on the CPU."""

    def buffer(self, name: str) -> torch.Tensor | None:
        """Return a persistent buffer; None leaves it as the model was built."""


class SeedWeights:
    """Initial weights as a pure function of (seed, canonical name, shape).

    Each parameter starts as the model's own code draws it (`initial`). Parameters without a law
    are normal if they are matrices, one if they are vectors and zero if they are biases.
    Normals are drawn in chunks, each from its own generator, so that a range costs only its own
    length.

    Args:
        std: Standard deviation of matrices without a law.
        factor: Extra factor on the random values of a parameter, by its name and shape (muP).
    """

    def __init__(
        self,
        seed: int,
        *,
        std: float,
        laws: Initializers | None = None,
        factor: Callable[[str, torch.Size], float] = lambda name, shape: 1.0,
    ) -> None:
        self._seed, self._std, self._laws, self._factor = seed, std, laws or {}, factor
        self._whole = ("", torch.empty(0))

    @classmethod
    def of(cls, config: ModelConfig, model: PreTrainedModel, seed: int) -> SeedWeights:
        """Return the weights that a model starts from."""
        return cls(
            seed,
            std=config.initializer_range,
            laws=parameter_initializers(model),
            factor=lambda name, shape: mup.initial_factor(config, mup.tensor_kind(name, shape)),
        )

    @property
    def initializers_digest(self) -> str:
        """SHA-256 of all initialisation laws: other laws give a seed other weights."""
        laws = {
            name: [[each.start, each.stop, each.law.named] for each in stretches]
            for name, stretches in self._laws.items()
        }
        text = json.dumps([self._std, laws], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        values = torch.empty(end - start)
        for stretch in self._laws.get(name) or [self._usual(name, shape)]:
            first, last = max(start, stretch.start), min(end, stretch.stop)
            if first < last:
                part = values[first - start : last - start]
                self._draw(part, stretch.law, name, shape, first)
        return values

    def buffer(self, name: str) -> torch.Tensor | None:
        return None

    def _usual(self, name: str, shape: torch.Size) -> InitializedRange:
        normal = Initializer(((torch.ops.aten.normal_.default, (0.0, self._std)),))
        law = ZERO if name.endswith(".bias") else normal if len(shape) > 1 else ONE
        return InitializedRange(0, shape.numel(), law)

    def _draw(
        self,
        values: torch.Tensor,
        law: Initializer | WholeInitializer,
        name: str,
        shape: torch.Size,
        start: int,
    ) -> None:
        """Fill `values` with the elements of a parameter from index `start` on."""
        if isinstance(law, WholeInitializer):
            if self._whole[0] != name:
                self._whole = name, law.draw(self._seed, name, shape)
            values.copy_(self._whole[1][start : start + values.numel()])
            return
        if not law.is_random:
            values.fill_(law.constant())
            return
        factor, end = self._factor(name, shape), start + values.numel()
        chunk = torch.empty(CHUNK)
        for index in range(start // CHUNK, math.ceil(end / CHUNK)):
            generator = torch.Generator().manual_seed(_seed_of(f"{self._seed}/{name}/{index}"))
            law.draw(chunk, generator, factor)
            base = index * CHUNK
            first, last = max(start, base), min(end, base + CHUNK)
            values[first - start : last - start] = chunk[first - base : last - base]


def _seed_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


class SafetensorsWeights:
    """Weights of a transformers directory in safetensors, in one file or several.

    A rank reads only the ranges that it keeps, and only the experts that it keeps. If transformers
    computes a tensor of the model from others, the rank holds one such tensor at a time.

    Args:
        model: The whole model, with or without values.

    Attributes:
        names: Canonical names of the tensors that the files have.

    Raises:
        TrainctlError: The files do not match the model, its head `score` aside; names the tensor
            and the file.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        self._folder, self._model = folder, model
        self._stored = stored_tensors(folder)
        self._found = StoredModel(model, self._stored)
        self._last: tuple[tuple[str, int | None], dict[str, torch.Tensor]] | None = None
        self.names = frozenset(self._found.joined)
        problems = self._found.problems
        if problems:
            raise TrainctlError(f"model.initial_weights: {folder}: {'; '.join(problems)}")

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        joined = self._found.joined[name]
        if joined.converter is None:
            return self._range(joined.names[0], start, end)
        if not joined.by_row:
            return self._converted(joined, None)[name].reshape(-1)[start:end].clone()
        size = math.prod(shape[1:])
        rows = []
        for row in range(start // size, math.ceil(end / size)):
            values = self._converted(joined, row)[name].reshape(-1)
            rows.append(values[max(start - row * size, 0) : end - row * size])
        return torch.cat(rows)

    def buffer(self, name: str) -> torch.Tensor | None:
        joined = self._found.joined[name]
        if joined.converter is None:
            return self._whole(joined.names[0])
        return self._converted(joined, None)[name]

    def _converted(self, joined: ConvertedTensors, row: int | None) -> dict[str, torch.Tensor]:
        """Return the tensors of a conversion, cached for reads of neighbouring ranges."""
        key = joined.first, row
        if self._last is None or self._last[0] != key:
            self._last = None  # free it before the next one is made
            self._last = key, joined.convert(self._model, self._whole, row)
        return self._last[1]

    def _whole(self, name: str) -> torch.Tensor:
        with safe_open(self._folder / self._stored[name].file, framework="pt") as file:
            return file.get_tensor(name).float()

    def _range(self, name: str, start: int, end: int) -> torch.Tensor:
        """Return elements [start, end) of a flattened tensor of the files."""
        stored = self._stored[name]
        if not stored.shape:
            return self._whole(name).reshape(1)[start:end]
        width = math.prod(stored.shape[1:])
        with safe_open(self._folder / stored.file, framework="pt") as file:
            rows = file.get_slice(name)[start // width : math.ceil(end / width)]
        offset = start - start // width * width
        return rows.reshape(-1)[offset : offset + end - start].float()


RANDOM = ("aten::normal_", "aten::uniform_", "aten::exponential_", "aten::bernoulli_.float")
CONSTANT = ("aten::zero_", "aten::fill_.Scalar")
ELEMENTWISE_FOLLOWUPS = (
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


def truncated_normal(
    tensor: torch.Tensor,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill a tensor from a normal distribution cut off at `a` and `b`, element by element.

    torch 2.13 draws again while values lie outside, which cannot be done on tensors
    without values, nor for a part of a tensor. This is the inverse of the cumulative distribution.
    """
    low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
    with torch.no_grad():
        tensor.uniform_(low, high, generator=generator)
        return tensor.erfinv_().mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)


initialization.TORCH_INIT_FUNCTIONS["trunc_normal_"] = truncated_normal


class NonShardableInit(TrainctlError):
    """Error: an initialisation cannot be repeated for a part of its parameter."""

    def __init__(self, name: str, operation: str) -> None:
        self.name, self.operation = name, operation
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


def constant_initializer(value: float) -> Initializer:
    """Return the law of one value for all elements."""
    return Initializer(((torch.ops.aten.fill_.Scalar, (value,)),))


ONE = constant_initializer(1.0)


@dataclass(frozen=True, slots=True)
class WholeInitializer:
    """Initialisation that needs the whole parameter: each rank draws all of it, one at a time."""

    function: Callable[[torch.Tensor], Any]
    """Sets the values of a zeroed tensor in place; random ones come from torch's own generator."""

    @property
    def named(self) -> list[tuple[str, tuple[Any, ...]]]:
        return [("whole", ())]

    def draw(self, seed: int, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the parameter, flat and fp32."""
        values = torch.zeros(shape)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_seed_of(f"{seed}/{name}"))
            self.function(values)
        return values.reshape(-1)


@dataclass(frozen=True, slots=True)
class InitializedRange:
    """Elements [start, stop) of a flattened parameter that share one law."""

    start: int
    stop: int
    law: Initializer | WholeInitializer


Initializers = dict[str, list[InitializedRange]]
"""Stretches of each parameter that the model's own code initialises. Later ones override earlier
ones.
"""


def parameter_initializers(model: PreTrainedModel) -> Initializers:
    """Return the initialisation laws of a whole skeleton, by canonical name.

    Raises:
        NonShardableInit: Operations that make a parameter cannot be repeated for a part of it.
    """
    own = getattr(model, "own_initializers", None)  # a module of the user's
    if own is not None:
        return own()
    names = {parameter: name for name, parameter in model.named_parameters()}
    recorder = InitRecorder(names)
    with torch.no_grad(), _untied_head(model, names), recorder:
        for owner, module in _innermost_first(model, model):
            owner._init_weights(module)
    return recorder.laws


@contextmanager
def _untied_head(model: PreTrainedModel, names: dict[nn.Parameter, str]) -> Iterator[None]:
    """Give a tied head a weight of its own, as transformers ties it after initialisation."""
    head: Any = model.get_output_embeddings()
    places = (path for path, module in model.named_modules() if module is head)
    if head is None or names[head.weight] == f"{next(places)}.weight":
        yield
        return
    tied = head.weight
    head.weight = nn.Parameter(torch.empty_like(tied))
    try:
        yield
    finally:
        head.weight = tied


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
        return run_operation(func, args, kwargs)


class InitRecorder(TorchDispatchMode):
    """Dispatch mode that records the in-place operations on meta parameters in `laws`."""

    def __init__(self, names: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self.laws: Initializers = {}
        self._known = {
            storage_id(parameter): (name, parameter) for parameter, name in names.items()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = run_operation(func, args, kwargs)
        target = args[0] if args else None
        if func._schema.is_mutable and isinstance(target, torch.Tensor):
            found = self._known.get(storage_id(target))
            if found is not None:
                self._note(*found, target, func, args[1:])
        return output

    def _note(
        self, name: str, whole: nn.Parameter, target: torch.Tensor, func: Any, args: tuple[Any, ...]
    ) -> None:
        start, stop = target.storage_offset(), target.storage_offset() + target.numel()
        stretches = self.laws.setdefault(name, [])
        is_repeatable = all(arg is None or isinstance(arg, int | float) for arg in args)
        if not is_repeatable or not target.is_contiguous():
            raise NonShardableInit(name, func.name())
        step = (func, args)
        if func.name() in RANDOM + CONSTANT:
            if target.numel() == whole.numel():
                stretches.clear()
            stretches.append(InitializedRange(start, stop, Initializer((step,))))
            return
        last = stretches[-1] if stretches else None
        is_same = last is not None and (last.start, last.stop) == (start, stop)
        if func.name() not in ELEMENTWISE_FOLLOWUPS or last is None or not is_same:
            raise NonShardableInit(name, func.name())
        assert isinstance(last.law, Initializer)
        stretches[-1] = InitializedRange(start, stop, Initializer((*last.law.operations, step)))


def run_operation(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation. An initialisation in place on a meta tensor only returns its target."""
    if func.name() in RANDOM + CONSTANT and args[0].is_meta:
        return args[0]
    return func(*args, **(kwargs or {}))


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's storage; without values it has no address."""
    return int(tensor.untyped_storage()._cdata)
