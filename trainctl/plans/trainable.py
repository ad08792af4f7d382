"""Trained, frozen and adapter tensors of a model. Pure, without torch.

Rules, groups, budget, counts and checkpoints use these; a rank verifies that the model it has built
agrees. All names are canonical. A tied weight is one tensor: frozen under one of its names, it is
frozen under both. With an adapter the whole model is frozen.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.models.anatomy import Role
from trainctl.options.adapter import BaseWeights, LowRank, low_rank
from trainctl.options.adapter import spec_of as adapter_of
from trainctl.options.model import architecture, spec_of
from trainctl.plans import shapes
from trainctl.plans.shapes import TensorShape

EMBEDDINGS, HEAD, ALL_BUT_LAST = "embeddings", "head", "all_but_last_blocks"
"""Keywords of `training.freeze`, not patterns; the last takes a number after a colon."""

LORA_A, LORA_B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude"
"""Names of an adapter's tensors, relative to the layer that they are added to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """Linear layer of a block, or stack of its experts' matrices, to which an adapter may be
    added.
    """

    name: str
    """Canonical name of the module, or of the parameter that stacks experts."""
    inputs: int
    """Input width."""
    outputs: int
    """Output width."""
    split: str | None = None
    """Dimension split by tensor parallelism: "outputs" or "inputs"; None if unknown or
    replicated.
    """
    shares: int = 0
    """Number of equal parts that tensor ranks can divide, if it is split."""
    inputs_first: bool = False
    """Whether the matrix has shape (inputs, outputs), as transformers' Conv1D has."""
    experts: int = 0
    """Number of experts whose matrices one parameter stacks; 0 for a linear layer."""

    @property
    def weight(self) -> str:
        """Canonical name of the parameter with the matrix or matrices."""
        return self.name if self.experts else f"{self.name}.weight"

    def added_name(self, tensor: str) -> str:
        """Return the canonical name of an adapter's tensor.

        Those of stacked experts are parameters of the module that has the stack.
        """
        return f"{self.name}{'_' if self.experts else '.'}{tensor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """Trained and frozen tensors of a run."""

    trained: tuple[TensorShape, ...]
    """Tensors that the optimizer updates, in the model's order; the adapter's at the end."""
    frozen: tuple[TensorShape, ...] = ()
    """Tensors without gradient, master copy or optimizer state."""
    adapted: tuple[LinearLayer, ...] = ()
    """Layers that have an adapter."""
    reasons: tuple[str, ...] = ()
    """Reasons, one sentence each."""

    @property
    def trained_elements(self) -> int:
        return sum(tensor.numel for tensor in self.trained)

    @property
    def frozen_elements(self) -> int:
        return sum(tensor.numel for tensor in self.frozen)


def trainable(config: RunConfig) -> Trainable:
    """Return the trained and the frozen tensors of a run.

    An entry of `training.freeze` or `adapter.targets` that matches nothing is ignored here;
    `trainctl.rules.plan.trainable` reports it.

    Raises:
        TrainctlError: Nothing is known of the model's tensors (`shapes.anatomy`).
    """
    tensors = tuple(shapes.all_tensors(config.model))
    adapter = low_rank(config.adapter)
    if adapter is not None:
        layers = adapted_layers(config.model, adapter)
        added = tuple(t for layer in layers for t in added_tensors(layer, adapter))
        own = also_trained(config.model, adapter)
        alone = f"adapter.also_train={adapter.also_train}" if adapter.also_train else "only it"
        if config.model.score_outputs is not None:
            alone += f" with {head_name(config.model)}"
        linear = sum(not layer.experts for layer in layers)
        stacks = f" and {len(layers) - linear} stacks of experts" if linear < len(layers) else ""
        why = (
            f"adapter.kind={adapter.kind}: {linear} linear layers{stacks} have one, and {alone} "
            "trains"
        )
        return Trainable(
            trained=(*(tensor for tensor in tensors if tensor.name in own), *added),
            frozen=tuple(tensor for tensor in tensors if tensor.name not in own),
            adapted=layers,
            reasons=(why,),
        )
    frozen = frozen_names(config)
    return Trainable(
        trained=tuple(tensor for tensor in tensors if tensor.name not in frozen),
        frozen=tuple(tensor for tensor in tensors if tensor.name in frozen),
        reasons=_freezing_reasons(config, frozen),
    )


def parameter_count_reasons(config: RunConfig) -> tuple[DerivedValue, ...]:
    """Return the numbers of trained and of frozen parameters; empty if all are trained."""
    if not is_partial(config) or config.model.is_unread:
        return ()
    found = trainable(config)
    why, source = "; ".join(found.reasons), "training.freeze"
    if low_rank(config.adapter) is not None:
        source = "adapter.kind"
    counts = {"trained": found.trained_elements, "frozen": found.frozen_elements}
    return tuple(
        derived(f"parameters.{name}", value, source, why=why) for name, value in counts.items()
    )


def is_partial(config: RunConfig) -> bool:
    """Return True if some of the model's own weights are frozen."""
    return low_rank(config.adapter) is not None or bool(config.training.freeze)


# --- frozen parts -----------------------------------------------------------------------------


def frozen_names(config: RunConfig) -> frozenset[str]:
    """Return the canonical names of the parameters that `training.freeze` freezes."""
    return _all_matching_parameters(config.model, config.training.freeze)


def _all_matching_parameters(model: ModelConfig, entries: Sequence[str]) -> frozenset[str]:
    """Return the canonical names of the parameters that the entries match; invalid ones are
    skipped.
    """
    found: set[str] = set()
    for entry in entries:
        with suppress(ValueError):
            found.update(matching_parameters(model, entry))
    return frozenset(found)


def also_trained(model: ModelConfig, adapter: LowRank) -> frozenset[str]:
    """Return the canonical names of the model's own parameters that train with an adapter: those
    of `also_train`, and a head `score`, which is new.
    """
    head = () if model.score_outputs is None else (HEAD,)
    return _all_matching_parameters(model, (*adapter.also_train, *head))


def matching_parameters(model: ModelConfig, entry: str) -> tuple[str, ...]:
    """Return the canonical names of the parameters that an entry of `training.freeze` matches.

    Raises:
        ValueError: The entry is neither a keyword nor a regular expression; the message says why.
    """
    tensors = tuple(shapes.all_tensors(model))
    tied = {alias: name for alias, name in tied_parameters(model) if name != alias}
    if entry == EMBEDDINGS:
        return tuple(tensor.name for tensor in tensors if tensor.embedding)
    if entry == HEAD:
        name = head_name(model)
        return (tied.get(name, name),)
    word, _, number = entry.partition(":")
    if word == ALL_BUT_LAST:
        return _all_but_last_block(model, tensors, number.strip())
    try:
        pattern = re.compile(entry)
    except re.error as problem:
        raise ValueError(f"is not a regular expression: {problem}") from None
    if not entry:
        raise ValueError("is empty")
    meant = {name for alias, name in tied.items() if pattern.search(alias)}
    return tuple(t.name for t in tensors if t.name in meant or pattern.search(t.name))


def _all_but_last_block(
    model: ModelConfig, tensors: tuple[TensorShape, ...], number: str
) -> tuple[str, ...]:
    """Return the names of the embeddings, and of all blocks but the last `number`."""
    if not number.isdecimal() or int(number) > model.num_layers:
        raise ValueError(f"needs a number of blocks up to {model.num_layers}: {ALL_BUT_LAST}:1")
    blocks, first = block_numbers(model), model.num_layers - int(number)
    return tuple(
        tensor.name
        for tensor in tensors
        if tensor.embedding or (tensor.name in blocks and blocks[tensor.name] < first)
    )


def block_numbers(model: ModelConfig) -> dict[str, int]:
    """Return the block index of each parameter that is in a block."""
    read = shapes.anatomy(model)
    if read is not None:
        return read.block_numbers
    found = ((tensor.name, shapes.block_of(tensor.name)) for tensor in shapes.all_tensors(model))
    return {name: block for name, block in found if block is not None}


def tied_parameters(model: ModelConfig) -> tuple[tuple[str, str], ...]:
    """Return the (alias, canonical name) pairs of tied parameters."""
    read = shapes.anatomy(model)
    if read is not None:
        return read.ties
    if not model.has_tied_head:
        return ()
    return ((shapes.head_tensor(model).name, shapes.embedding_tensors(model)[0].name),)


def head_name(model: ModelConfig) -> str:
    """Return the name of the output projection's weight, which may be an alias of a tied tensor."""
    read = shapes.anatomy(model)
    if read is None:
        return shapes.head_tensor(model).name
    own = (p.name for p in read.parameters if p.role is Role.head)
    return next(own, next((alias for alias, _ in read.ties), ""))


def frozen_ties(config: RunConfig) -> tuple[tuple[str, str], ...]:
    """Return the (alias, canonical name) pairs of tied parameters that are frozen."""
    frozen = frozen_names(config)
    return tuple((alias, name) for alias, name in tied_parameters(config.model) if name in frozen)


def _freezing_reasons(config: RunConfig, frozen: frozenset[str]) -> tuple[str, ...]:
    if not frozen:
        return ()
    why = [f"training.freeze={config.training.freeze}"]
    for alias, name in frozen_ties(config):
        why.append(f"{alias} and {name} are one tensor, frozen under both names")
    return tuple(why)


def idle_stages(config: RunConfig, sizes: Sequence[int]) -> list[int]:
    """Return the pipeline stages on which nothing trains, given the number of blocks of each."""
    blocks, last = block_numbers(config.model), len(sizes) - 1
    starts = [sum(sizes[:stage]) for stage in range(len(sizes))]
    found = trainable(config)
    busy = {bisect_right(starts, blocks[layer.weight]) - 1 for layer in found.adapted}
    own = {tensor.name for tensor in shapes.all_tensors(config.model)}
    tied = {name for _, name in tied_parameters(config.model)}
    for tensor in (tensor for tensor in found.trained if tensor.name in own):
        block = blocks.get(tensor.name)
        if block is not None:
            busy.add(bisect_right(starts, block) - 1)
            continue
        if tensor.embedding:
            busy.add(0)
        if not tensor.embedding or tensor.name in tied:
            busy.add(last)
    return [stage for stage in range(len(sizes)) if stage not in busy]


# --- adapters ---------------------------------------------------------------------------------


def adapted_layers(model: ModelConfig, adapter: LowRank) -> tuple[LinearLayer, ...]:
    """Return the linear layers and stacked experts that `adapter.targets` names; without targets,
    all linear layers in the blocks.
    """
    layers = tuple(linear_layers(model))
    if not adapter.targets:
        return layers
    layers += tuple(stacked_experts(model))
    return tuple(layer for layer in layers if any(is_target(layer, t) for t in adapter.targets))


def is_target(layer: LinearLayer, target: str) -> bool:
    """Return True if the layer's name ends with the target: `q_proj`, or `self_attn.q_proj`.

    A stack of experts needs the module's name too, `experts.down_proj`: dense layers beside it may
    have the same last part.
    """
    if layer.experts and "." not in target:
        return False
    return layer.name == target or layer.name.endswith(f".{target}")


SPLIT_BY_INPUTS = ("o_proj", "down_proj", "c_proj", "dense", "dense_4h_to_h", "fc2")
"""Names of the linear layers that tensor ranks split by inputs, in architectures without a family
(`base_model_tp_plan` of transformers). All others of their layers are split by outputs.
"""


def linear_layers(model: ModelConfig) -> Iterator[LinearLayer]:
    """Yield the linear layers of the blocks, in the model's order.

    Routers are excluded, and so are experts stored in one tensor: their weights belong to no linear
    module.
    """
    family, is_module = architecture(model), spec_of(model).is_module
    rows = SPLIT_BY_INPUTS if family is None else [region.row for region in family.regions]
    inputs_first = (family or spec_of(model)).inputs_first
    for name, shape, shares in _block_matrices(model):
        module = name.removesuffix(".weight")
        outputs, inputs = reversed(shape) if inputs_first else shape
        split = "inputs" if module.rpartition(".")[2] in rows else "outputs"
        yield LinearLayer(
            name=module,
            inputs=inputs,
            outputs=outputs,
            split=split if shares and not is_module else None,
            shares=shares,
            inputs_first=inputs_first,
        )


def stacked_experts(model: ModelConfig) -> Iterator[LinearLayer]:
    """Yield the parameters that stack a matrix of all experts of a layer, in the model's order."""
    read = shapes.anatomy(model)
    if read is None or read.has_custom_expert_forward:
        return
    for parameter in read.parameters:
        if parameter.role is Role.expert and len(parameter.shape) == 3:
            experts, outputs, inputs = parameter.shape
            if read.has_inputs_first_experts:
                outputs, inputs = inputs, outputs
            split = "inputs" if parameter.name.endswith(".down_proj") else "outputs"
            yield LinearLayer(
                name=parameter.name,
                inputs=inputs,
                outputs=outputs,
                split=split if parameter.shares else None,
                shares=parameter.shares,
                inputs_first=read.has_inputs_first_experts,
                experts=experts,
            )


def _block_matrices(model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...], int]]:
    """Yield name, shape and shares of the weights of linear layers in blocks."""
    read = shapes.anatomy(model)
    if read is None:
        blocks = block_numbers(model)
        for tensor in shapes.all_tensors(model):
            if tensor.is_matrix and tensor.name in blocks:
                yield tensor.name, tensor.shape, tensor.shares
        return
    for parameter in read.parameters:
        is_layer = parameter.role in (Role.weight, Role.shared) and len(parameter.shape) == 2
        if is_layer and parameter.block is not None and parameter.name.endswith(".weight"):
            yield parameter.name, parameter.shape, parameter.shares


def added_tensors(layer: LinearLayer, adapter: LowRank) -> tuple[TensorShape, ...]:
    """Return the tensors that an adapter adds to a layer, in the type of the model's weights.

    Tensor parallelism splits B of a layer split by outputs, and A of a layer split by inputs. Those
    of stacked experts have the experts as first dimension.
    """
    by_outputs, by_inputs = (
        layer.shares if layer.split == way else 0 for way in ("outputs", "inputs")
    )
    stack = (layer.experts,) if layer.experts else ()
    found = [
        TensorShape(
            name=layer.added_name(LORA_A),
            shape=(*stack, adapter.rank, layer.inputs),
            shares=by_inputs,
        ),
        TensorShape(
            name=layer.added_name(LORA_B),
            shape=(*stack, layer.outputs, adapter.rank),
            shares=by_outputs,
        ),
    ]
    if adapter_of(adapter).has_magnitude:
        name = layer.added_name(MAGNITUDE)
        found.append(TensorShape(name=name, shape=(layer.outputs,), shares=by_outputs))
    return tuple(found)


BLOCK = 64
"""NF4 weights that share a scale, in the order of the flattened matrix."""

BLOCK_OF_SCALES = 256
"""Number of 8-bit scales that share a second-level scale (double quantization)."""

SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Size of a quantized matrix: one tensor of bytes, its scales before its codes.

    ZeRO and every count of bytes see one frozen parameter under its usual name. NF4 has a scale for
    each block of 64 weights (arXiv:2305.14314); 8 bits has one for each row (arXiv:2208.07339).
    Double quantization keeps the blocks' scales in 8 bits, with one scale for 256 of them and one
    number for all.
    """

    header: int
    """Bytes of the scales, which come first."""
    codes: int
    """Bytes of the quantized weights."""

    @property
    def total(self) -> int:
        return self.header + self.codes


def packed_size(kind: BaseWeights, outputs: int, inputs: int) -> PackedSize:
    """Return the size of a quantized (outputs, inputs) matrix that divides into whole blocks."""
    weights = outputs * inputs
    if kind is BaseWeights.int8:
        return PackedSize(SCALE_BYTES * outputs, weights)
    blocks = weights // BLOCK
    if kind is BaseWeights.nf4:
        return PackedSize(SCALE_BYTES * blocks, weights // 2)
    assert kind is BaseWeights.nf4_double
    upper = -(-blocks // BLOCK_OF_SCALES)
    return PackedSize(SCALE_BYTES * (1 + upper) + blocks, weights // 2)


def quantized_layers(model: ModelConfig, adapter: LowRank | None) -> dict[str, LinearLayer]:
    """Return the linear layers whose matrix is quantized, with an adapter or without, by canonical
    name of the matrix; empty if the run keeps its base weights in the compute type.
    """
    if adapter is None or not adapter.is_quantized:
        return {}
    return {f"{layer.name}.weight": layer for layer in linear_layers(model)}
