"""Optimizer of a plan: implementation, refused settings, learning rates and parameter groups.

The plan, which prints the groups, and the trainer, which builds them, use the same rule:

- Matrices are decayed. Vectors (norms, biases) and embeddings are not, nor is an output projection
  tied to the embedding. `optimizer.decay_embeddings` decays embeddings too.
- Muon updates the matrices inside blocks; AdamW updates everything else.
- The learning rate of a tensor is the base rate, `optimizer.lr` or Muon's `optimizer.matrix_lr`,
  times three factors: the factor of the first entry of `optimizer.groups` whose pattern matches its
  canonical name; `optimizer.layer_lr_decay` to the power of the blocks above it (arXiv:1801.06146,
  section 3.1); and muP's factor, by whose inverse the weight decay is multiplied.
- An entry of `optimizer.groups` may also limit the gradient norm of its group: the tensors with
  the same numbers, as the plan lists them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import sqrt

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import (
    Accelerator,
    AdaptiveClipping,
    DataType,
    GroupOverride,
    LrScaling,
    OffloadDevice,
    OptimizerConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plans import mup, shapes
from trainctl.plans.mup import TensorKind
from trainctl.plans.shapes import TensorShape
from trainctl.plans.trainable import block_numbers, trainable
from trainctl.plans.types import Batch, peak_rate


@dataclass(frozen=True, slots=True)
class Refusal:
    """Setting that the optimizer does not allow, with the reason and the nearest allowed one."""

    key: str
    value: object
    why: str
    nearest: str


def refused_settings(config: RunConfig) -> Iterator[Refusal]:
    """Yield the settings of a config that its optimizer does not allow in trainctl's trainer."""
    can = spec_of(config.optimizer)
    stage, offload = config.zero_stage.stage, config.offload.optimizer
    if stage not in can.stages:
        nearest = min(can.stages, key=lambda each: abs(each - stage))
        yield Refusal("zero_stage.stage", stage, can.why_not["stage"], f"zero_stage={nearest}")
    if offload not in can.offload:
        name = offload.value
        nearest_place = can.offload[-1].value
        yield Refusal("offload.optimizer", name, can.why_not[name], f"offload={nearest_place}")
    if config.parallelism.tensor > 1 and not can.tensor:
        size = config.parallelism.tensor
        yield Refusal("parallelism.tensor", size, can.why_not["tensor"], "parallelism.tensor=1")
    tensor, tokens = config.parallelism.tensor, config.model.vocab_size
    if stage == 3 and tokens % tensor and not (can.is_elementwise or can.has_matrix_rule):
        why = (
            f"tensor ranks with unequal shares of the vocabulary (model.vocab_size={tokens}) cut "
            "sub-groups at other parameters, whose sums would not meet"
        )
        even = tokens + -tokens % tensor
        yield Refusal("zero_stage.stage", stage, why, f"zero_stage=2, or model.vocab_size={even}")
    for name in ("master_weights", "optimizer_states"):
        kept = getattr(config.precision, name)
        if kept is not DataType.fp32 and not can.low_precision_states:
            key = f"precision.{name}"
            yield Refusal(key, kept.value, can.why_not["states"], f"{key}=fp32")


def is_fused(config: RunConfig, hardware: Hardware) -> bool:
    """Return True if a single fused kernel on the device makes the update."""
    if spec_of(config.optimizer).fused_by not in engine_of(config).makers:
        return False
    if config.offload.optimizer is not OffloadDevice.none:
        return False
    if config.optimizer.fused is None:
        return hardware.accelerator is not Accelerator.cpu
    return config.optimizer.fused


def implementation_reasons(config: RunConfig, hardware: Hardware) -> Iterator[DerivedValue]:
    """Yield the optimizer's implementation and fusion where the config does not set them."""
    if not config.trains_itself:
        return
    spec, made_by = spec_of(config.optimizer), optimizer_maker(config, hardware)
    if made_by is Maker.trainctl:
        needs = f"one element's update needs {spec.needs}, and ZeRO's pieces are cut anywhere"
        why = spec.is_ours_because or needs
        yield derived("optimizer.made_by", made_by.value, why=why)
    if config.optimizer.fused is None and is_fused(config, hardware):
        yield derived("optimizer.fused", True, why=f"on {hardware.accelerator.value}")


def optimizer_maker(config: RunConfig, hardware: Hardware) -> Maker:
    """Return whose implementation updates the weights. torch's and DeepSpeed's are named in the
    JSON; trainctl's is passed beside it.
    """
    spec = spec_of(config.optimizer)
    if config.offload.optimizer is not OffloadDevice.none:
        on_host = spec.made_on_host_by or spec.made_by
        return on_host if on_host in engine_of(config).makers else spec.made_by
    # torch's fused kernel is an argument of its optimizer; DeepSpeed's is a class of its own.
    if spec.fused_by is Maker.deepspeed and is_fused(config, hardware):
        return spec.fused_by
    return spec.made_by


SOURCES = {LrScaling.linear: "arXiv:1706.02677", LrScaling.sqrt: "arXiv:2205.10287"}


def lr_scale(optimizer: OptimizerConfig, batch: Batch) -> float:
    """Return the factor of all learning rates; 1 without scaling.

    `optimizer.lr` is the rate tuned at b = `optimizer.lr_scaling_batch_size` sequences. At a global
    batch of B, which is the batch after a ramp, the factor is

    - linear: B / b, for SGD                         (arXiv:1706.02677, the linear scaling rule)
    - sqrt: sqrt(B / b), for Adam and its relatives  (arXiv:2205.10287, the square root rule)
    """
    if optimizer.lr_scaling is LrScaling.none or optimizer.lr_scaling_batch_size is None:
        return 1.0
    ratio = batch.global_batch_size / optimizer.lr_scaling_batch_size
    return ratio if optimizer.lr_scaling is LrScaling.linear else sqrt(ratio)


def learning_rate_reasons(config: RunConfig, batch: Batch) -> Iterator[DerivedValue]:
    """Yield the scaled rates with their arithmetic, and adaptive clipping if enabled."""
    optimizer, scale = config.optimizer, lr_scale(config.optimizer, batch)
    if optimizer.lr_scaling is not LrScaling.none:
        ratio = (
            f"global_batch_size {batch.global_batch_size} /"
            f" optimizer.lr_scaling_batch_size {optimizer.lr_scaling_batch_size}"
        )
        factor = f"sqrt({ratio})" if optimizer.lr_scaling is LrScaling.sqrt else f"({ratio})"
        source = SOURCES[optimizer.lr_scaling]
        for name in filter(None, ("lr", spec_of(optimizer).matrix_lr)):
            if (rate := getattr(optimizer, name)) is not None:
                why = f"optimizer.{name} {rate:g} x {factor}, {source}"
                sources = (f"optimizer.{name}", "optimizer.lr_scaling_batch_size")
                peak = peak_rate(optimizer, scale, name)
                yield derived(f"peak_{name}", peak, *sources, why=why)
    if config.trains_itself and config.gradients.adaptive_clipping is not AdaptiveClipping.none:
        kind = config.gradients.adaptive_clipping.value
        fixed = f"optimizer.gradient_clipping {optimizer.gradient_clipping:g}"
        why = f"decides alone, in place of {fixed}"
        if config.gradients.adaptive_clipping is AdaptiveClipping.mean:
            why = f"decides alone from the second update on, {fixed} for the first"
        sources = ("gradients.adaptive_clipping", "optimizer.gradient_clipping")
        yield derived("clip_at", kind, *sources, why=f"gradients.adaptive_clipping={kind} {why}")


@dataclass(frozen=True, slots=True, order=True)
class GroupKey:
    """Common update settings of the tensors in a group."""

    uses_muon: bool
    """Whether Muon updates the tensors."""
    is_decayed: bool
    """Whether `optimizer.weight_decay` applies."""
    lr_factor: float
    """Multiple of the base learning rate."""
    weight_decay: float
    clip_at: float = 0.0
    """Limit of the gradient norm of the entry's tensors together; 0 for no limit of their own."""
    clip_entry: int = -1
    """Index of the entry of `optimizer.groups` with that limit; -1 for none."""

    def name(self, config: RunConfig) -> str:
        """Return a name unique among the groups of a config, and the same on every layout."""
        words = ["muon" if self.uses_muon else "decayed" if self.is_decayed else "undecayed"]
        if self.lr_factor != 1:
            words.append(f"lr x{self.lr_factor:.6g}")
        if self.weight_decay != (config.optimizer.weight_decay if self.is_decayed else 0.0):
            words.append(f"decay {self.weight_decay:.6g}")
        if self.clip_at:
            limits = [entry.gradient_clipping for entry in config.optimizer.groups]
            at = f" at {self.clip_entry}" if limits.count(self.clip_at) > 1 else ""
            words.append(f"clip {self.clip_at:.6g}{at}")
        return ", ".join(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Tensors that are updated by the same rule with the same numbers."""

    name: str
    """Name in the records and the plan."""
    lr_factor: float
    """Multiple of the base learning rate."""
    weight_decay: float
    uses_muon: bool
    """Whether Muon updates the tensors."""
    parameters: tuple[str, ...]
    """Canonical names, in the model's order."""
    elements: int
    """Elements of all tensors together."""


def group_rate(group: GroupKey | ParameterGroup, config: RunConfig, lr_scale: float) -> float:
    """Return a group's learning rate at the peak of the schedule."""
    key = spec_of(config.optimizer).matrix_lr if group.uses_muon else ""
    return peak_rate(config.optimizer, group.lr_factor, key or "lr") * lr_scale


def parameter_groups(config: RunConfig) -> tuple[ParameterGroup, ...]:
    """Return the groups of the whole model. Every trained tensor is in exactly one."""
    members: dict[GroupKey, list[TensorShape]] = {}
    for tensor in trainable(config).trained:
        key = group_of(config, tensor.name, tensor.shape, embedding=tensor.embedding)
        members.setdefault(key, []).append(tensor)
    return tuple(
        ParameterGroup(
            name=key.name(config),
            lr_factor=key.lr_factor,
            weight_decay=key.weight_decay,
            uses_muon=key.uses_muon,
            parameters=tuple(tensor.name for tensor in members[key]),
            elements=sum(tensor.numel for tensor in members[key]),
        )
        for key in order_groups(members)
    )


def order_groups(keys: Iterable[GroupKey]) -> list[GroupKey]:
    """Return the keys in the order of the optimizer's groups: Muon's, the decayed, the others."""

    def place(key: GroupKey) -> tuple[bool, bool, float, float, float, int]:
        numbers = (-key.lr_factor, -key.weight_decay, key.clip_at, key.clip_entry)
        return (not key.uses_muon, not key.is_decayed, *numbers)

    return sorted(keys, key=place)


def group_of(
    config: RunConfig,
    name: str,
    shape: Sequence[int],
    *,
    embedding: bool | None = None,
    head: bool = False,
) -> GroupKey:
    """Return the group of one tensor.

    `shape` is the shape of the whole tensor, not of a rank's shard. `embedding` says whether the
    tensor is an embedding; None decides by the names of the model family. `head` marks the output
    projection under any name.
    """
    kind = mup.tensor_kind(name, tuple(shape))
    if embedding:
        kind = TensorKind.embedding
    elif head and len(shape) > 1:
        kind = TensorKind.output
    elif embedding is not None and kind is TensorKind.embedding:
        kind = TensorKind.output  # tied by its name, but not an embedding
    optimizer, model = config.optimizer, config.model
    entry, override = matching_override(config, name)
    is_decayed = kind in (TensorKind.hidden, TensorKind.output) or (
        kind is TensorKind.embedding and optimizer.decay_embeddings
    )
    is_decayed = is_decayed and name not in shapes.undecayed(model)
    weight_decay = optimizer.weight_decay if is_decayed else 0.0
    if override is not None and override.weight_decay is not None:
        weight_decay = override.weight_decay
    lr_factor = (
        (override.lr_factor if override is not None else 1.0)
        * optimizer.layer_lr_decay ** blocks_above(config, name, kind)
        * mup.lr_factor(model, optimizer, kind)
    )
    clip_at = (override.gradient_clipping if override is not None else None) or 0.0
    return GroupKey(
        clip_at=clip_at,
        clip_entry=entry if clip_at else -1,
        uses_muon=(
            spec_of(optimizer).has_matrix_rule
            and kind is TensorKind.hidden
            and len(shape) == 2  # a tensor that stacks experts is not a matrix
        ),
        is_decayed=is_decayed,
        lr_factor=lr_factor,
        weight_decay=weight_decay * mup.decay_factor(model, optimizer, kind),
    )


def blocks_above(config: RunConfig, name: str, kind: TensorKind) -> int:
    """Return the blocks between a tensor and the output: all for embeddings, 0 for the last
    norm.
    """
    if config.model.is_module and not config.model.is_unread:  # blocks under any name
        block = block_numbers(config.model).get(name)
    else:
        block = shapes.block_of(name)
    if block is not None:
        return max(0, config.model.num_layers - 1 - block)
    return config.model.num_layers if kind is TensorKind.embedding else 0


def matching_override(config: RunConfig, name: str) -> tuple[int, GroupOverride | None]:
    """Return index and value of the first entry of `optimizer.groups` whose pattern matches the
    name; -1 and None if none does.
    """
    for index, entry in enumerate(config.optimizer.groups):
        if re.search(entry.match, name):
            return index, entry
    return -1, None
