"""Adapters on a rank: linear layers and experts of a skeleton that add a low-rank product.

A layer stays the same object under the same name and only changes its class. So canonical names,
tensor cuts and checkpoints still find its weight. `lora_A`, `lora_B` and, for DoRA,
`lora_magnitude` are parameters beside it; beside stacked experts they have one matrix per expert.
Formulas and scales are PEFT's (peft/tuners/lora).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.options.adapter import LowRank, low_rank, spec_of
from trainctl.plans.settings import number_formats
from trainctl.plans.trainable import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    LinearLayer,
    added_tensors,
    is_partial,
    trainable,
)
from trainctl.train.models.model import TORCH_TYPES
from trainctl.train.models.weights import (
    ZERO,
    InitializedRange,
    Initializer,
    Initializers,
    SeedWeights,
    WeightSource,
)


class LoraLayer(nn.Module):
    """Mixin of a layer with an adapter, placed before the layer's class."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    lora_scale: float
    lora_dropout: float

    def added(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return s B A x."""
        return F.linear(F.linear(inputs, self.lora_A), self.lora_B) * self.lora_scale

    def dropped(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the adapter's inputs, with dropout in training.

        The mask is drawn by torch's generator, which each step seeds (`session.seed_step`).
        """
        return F.dropout(inputs, self.lora_dropout, self.training)


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the frozen weights alone within the context."""
    layers = {each: each.lora_scale for each in model.modules() if isinstance(each, LoraLayer)}
    for layer in layers:
        layer.lora_scale = 0.0
    try:
        yield
    finally:
        for layer, scale in layers.items():
            layer.lora_scale = scale


class LoraLinear(LoraLayer, nn.Linear):
    """Linear layer with LoRA: W x + b + s B A x."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, self.weight, self.bias) + self.added(self.dropped(input))


class LoraConv1D(LoraLayer, Conv1D):
    """gpt2's Conv1D with LoRA; its weight is (inputs, outputs)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.added(self.dropped(x))


class DoraLayer(LoraLayer):
    """DoRA mixin: the rows of W + s B A are scaled to trainable magnitudes (arXiv:2402.09353).

    The rows' own lengths are constants for the gradient (section 4.3 there).
    """

    lora_magnitude: nn.Parameter

    def lengths(self, merged: torch.Tensor) -> torch.Tensor:
        """Return the row lengths of W + s B A; tensor ranks may hold parts of the rows."""
        return torch.linalg.norm(merged, dim=1)

    def scaled(
        self, plain: torch.Tensor, inputs: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the layer's outputs without its bias.

        Args:
            plain: W x, of inputs without dropout.
            weight: W, (outputs, inputs).
        """
        if self.lora_scale == 0:  # `without_adapters`: the magnitude is the adapter's too
            return plain
        with torch.no_grad():
            lengths = self.lengths(weight + (self.lora_B @ self.lora_A) * self.lora_scale)
        factor = self.lora_magnitude / lengths
        if not (self.training and self.lora_dropout):
            return factor * (plain + self.added(inputs))
        dropped = self.dropped(inputs)
        return plain + (factor - 1) * self.plain(dropped, weight) + factor * self.added(dropped)

    def plain(self, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return W x of inputs with dropout."""
        return F.linear(inputs, weight)


class DoraLinear(DoraLayer, nn.Linear):
    """Linear layer with DoRA."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.scaled(F.linear(input, self.weight), input, self.weight)
        return output if self.bias is None else output + self.bias


class DoraConv1D(DoraLayer, Conv1D):
    """gpt2's Conv1D with DoRA."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x @ self.weight, x, self.weight.T) + self.bias


class LoraExperts(LoraLayer):
    """Mixin of a layer's experts with LoRA on stacked matrices, placed before transformers' class.

    While the experts compute, an adapted parameter's name gives a `LowRankSum`.
    """

    lora_names: tuple[str, ...]
    """Names of the parameters with an adapter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for name in self.lora_names:
            # Instance attributes are found before parameters.
            self.__dict__[name] = LowRankSum(
                self._parameters[name],
                getattr(self, f"{name}_{LORA_A}").mT,
                getattr(self, f"{name}_{LORA_B}").mT * self.lora_scale,
            )
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self.lora_names:
                del self.__dict__[name]


class LowRankSum:
    """Stacked matrices W + s B A, in a grouped product that never adds them up.

    transformers' `grouped_mm_experts_forward` multiplies by it as by a tensor.
    """

    def __init__(self, weight: Any, down: torch.Tensor, up: torch.Tensor) -> None:
        self.weight, self.down, self.up = weight, down, up

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weight, name)

    def transpose(self, *dimensions: int) -> LowRankSum:
        """Return the sum with the outputs of W last. A and B are so already."""
        return LowRankSum(self.weight.transpose(*dimensions), self.down, self.up)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> torch.Tensor:
        """Return x W + (x A) (s B) of each group of rows x; the function is a grouped product."""
        rows, own, *rest = args
        product = partial(function, **(kwargs or {}))
        added = product(product(rows, own.down, *rest), own.up, *rest)
        return product(rows, own.weight, *rest) + added


_CLASSES: dict[tuple[type, bool], type] = {
    (nn.Linear, False): LoraLinear,
    (Conv1D, False): LoraConv1D,
    (nn.Linear, True): DoraLinear,
    (Conv1D, True): DoraConv1D,
}
"""LoraLayer class by the class of a layer and by whether magnitudes train."""


def apply_adapter(model: PreTrainedModel, config: RunConfig) -> None:
    """Add a run's adapter to a whole skeleton, and set `requires_grad` as the plan says.

    Raises:
        TrainctlError: The trainable tensors of the model differ from the plan's.
    """
    if not is_partial(config):
        return
    plan, adapter = trainable(config), low_rank(config.adapter)
    if adapter is not None:
        function_of("adapter", adapter.kind)(model, adapter, plan.adapted)
    expected = {tensor.name: tensor.shape for tensor in plan.trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in expected)
    found = {
        name: tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad
    }
    if found != expected:
        wrong = sorted(
            name for name in {*found, *expected} if found.get(name) != expected.get(name)
        )
        raise TrainctlError(
            f"{type(model).__name__} has other tensors than the plan: {wrong[0]} is "
            f"{found.get(wrong[0])}, and not {expected.get(wrong[0])}"
        )


def attach(model: PreTrainedModel, section: LowRank, layers: Sequence[LinearLayer]) -> None:
    """Add adapters to layers of a skeleton.

    Raises:
        TrainctlError: A layer is not of a supported linear class.
    """
    spec = spec_of(section)
    for layer in layers:
        if layer.experts:
            _attach_to_experts(model, section, layer)
            continue
        module: Any = model.get_submodule(layer.name)
        adapted = _CLASSES.get((type(module), spec.has_magnitude))
        if adapted is None:
            raise TrainctlError(
                f"adapter.targets: {layer.name} is a {type(module).__name__}, and adapters are for "
                "linear layers",
                hint="name the others in adapter.targets",
            )
        _register_tensors(module, module.weight.dtype, layer, section)
        # Change the class in place: the block calls this object by its name.
        module.__class__ = adapted
        module.lora_scale, module.lora_dropout = spec.scale(section), section.dropout


def _attach_to_experts(model: PreTrainedModel, section: LowRank, layer: LinearLayer) -> None:
    owner, _, name = layer.name.rpartition(".")
    module: Any = model.get_submodule(owner)
    _register_tensors(module, getattr(module, name).dtype, layer, section)
    if not isinstance(module, LoraExperts):
        kind = type(module)
        module.__class__ = type(kind.__name__, (LoraExperts, kind), {})
        module.lora_scale, module.lora_dropout = spec_of(section).scale(section), 0.0
        module.lora_names = ()
        module.config._experts_implementation = "grouped_mm"
    module.lora_names += (name,)


def _register_tensors(
    module: nn.Module, dtype: torch.dtype, layer: LinearLayer, section: LowRank
) -> None:
    """Give a module the adapter's parameters of one layer, on the meta device."""
    for tensor in added_tensors(layer, section):
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        module.register_parameter(tensor.name.rpartition(".")[2], nn.Parameter(empty))


def added_parameters(layer: nn.Module) -> list[nn.Parameter]:
    """Return the adapter parameters of a layer; empty without an adapter."""
    found = (getattr(layer, name, None) for name in (LORA_A, LORA_B, MAGNITUDE))
    return [parameter for parameter in found if parameter is not None]


def initial_adapter(
    seed: int, config: RunConfig, base: WeightSource, shapes: Mapping[str, list[int]]
) -> WeightSource:
    """Return a source of an adapter's initial values: PEFT's, as a function of seed and name.

    A is uniform within 1 / sqrt(inputs), which is Kaiming's with a = sqrt(5). B is zero, so
    that the model equals its base at step 0. A magnitude is the length of its row in the
    compute format.
    """
    laws: Initializers = {}
    lengths: dict[str, LinearLayer] = {}
    adapter = low_rank(config.adapter)
    assert adapter is not None
    for layer in trainable(config).adapted:
        bound = 1 / math.sqrt(layer.inputs)
        uniform = Initializer(((torch.ops.aten.uniform_.default, (-bound, bound)),))
        first, second, *_ = added_tensors(layer, adapter)
        laws[first.name] = [InitializedRange(0, first.numel, uniform)]
        laws[second.name] = [InitializedRange(0, second.numel, ZERO)]
        lengths[layer.added_name(MAGNITUDE)] = layer
    dtype = TORCH_TYPES[number_formats(config.precision).weights]
    return _Initial(SeedWeights(seed, std=0.0, laws=laws), base, lengths, shapes, dtype)


class _Initial:
    """Weight source of drawn matrices and of magnitudes measured on the base."""

    def __init__(
        self,
        drawn: WeightSource,
        base: WeightSource,
        lengths: Mapping[str, LinearLayer],
        shapes: Mapping[str, list[int]],
        dtype: torch.dtype,
    ) -> None:
        self._drawn, self._base, self._lengths, self._shapes = drawn, base, lengths, shapes
        self._dtype = dtype

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        layer = self._lengths.get(name)
        if layer is None:
            return self._drawn.read(name, shape, start, end)
        weight = weight_of(self._base, layer, self._shapes, start, end)
        return torch.linalg.norm(weight.to(self._dtype).float(), dim=1)

    def buffer(self, name: str) -> torch.Tensor | None:
        return None  # an adapter has no buffers


def weight_of(
    source: WeightSource, layer: LinearLayer, shapes: Mapping[str, list[int]], first: int, last: int
) -> torch.Tensor:
    """Return rows [first, last) of a layer's weight, (outputs, inputs) however it is stored."""
    name = layer.weight
    shape = torch.Size(shapes[name])
    if layer.inputs_first:
        return source.read(name, shape, 0, shape.numel()).view(shape).T[first:last]
    width = layer.inputs
    return source.read(name, shape, first * width, last * width).view(-1, width)


class MergedWeights:
    """Weights of a model with an adapter merged in: W + s B A; DoRA scales to the magnitudes."""

    def __init__(
        self,
        own: WeightSource,
        base: WeightSource,
        layers: Sequence[LinearLayer],
        section: LowRank,
        shapes: Mapping[str, list[int]],
    ) -> None:
        self._own, self._base, self._shapes = own, base, shapes
        self._layers = {layer.weight: layer for layer in layers}
        self._rank, self._scale = section.rank, spec_of(section).scale(section)
        self._has_magnitude = spec_of(section).has_magnitude

    def read(self, name: str, shape: torch.Size, start: int, end: int) -> torch.Tensor:
        layer = self._layers.get(name)
        if layer is None:
            return self._base.read(name, shape, start, end)
        if layer.experts:
            each = layer.inputs * layer.outputs
            first, last = start // each, -(-end // each)
            merged = self._merged_experts(layer, shape, first, last).reshape(-1)
            return merged[start - first * each : end - first * each]
        if layer.inputs_first:  # stored transposed, so all of it is merged
            return self._rows(layer, 0, layer.outputs).T.reshape(-1)[start:end]
        width = layer.inputs
        first, last = start // width, -(-end // width)
        offset = first * width
        return self._rows(layer, first, last).reshape(-1)[start - offset : end - offset]

    def buffer(self, name: str) -> torch.Tensor | None:
        values = self._own.buffer(name)
        return self._base.buffer(name) if values is None else values

    def _rows(self, layer: LinearLayer, first: int, last: int) -> torch.Tensor:
        """Return rows [first, last) of the merged weight, (outputs, inputs)."""
        a = self._whole(f"{layer.name}.{LORA_A}", (self._rank, layer.inputs))
        b = self._whole(f"{layer.name}.{LORA_B}", (layer.outputs, self._rank))
        rows = weight_of(self._base, layer, self._shapes, first, last)
        rows = rows + self._scale * (b[first:last] @ a)
        if self._has_magnitude:
            lengths = self._whole(f"{layer.name}.{MAGNITUDE}", (layer.outputs,))[first:last]
            rows = rows * (lengths / torch.linalg.norm(rows, dim=1))[:, None]
        return rows

    def _merged_experts(
        self, layer: LinearLayer, shape: torch.Size, first: int, last: int
    ) -> torch.Tensor:
        """Return the merged matrices of experts [first, last), as they are stored."""
        each = layer.inputs * layer.outputs
        weights = self._base.read(layer.weight, shape, first * each, last * each)
        a = self._whole(layer.added_name(LORA_A), (layer.experts, self._rank, layer.inputs))
        b = self._whole(layer.added_name(LORA_B), (layer.experts, layer.outputs, self._rank))
        added = self._scale * (b[first:last] @ a[first:last])
        return weights.view(-1, *shape[1:]) + (added.mT if layer.inputs_first else added)

    def _whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        size = torch.Size(shape)
        return self._own.read(name, size, 0, size.numel()).view(size)
