"""Parameter groups of the optimizer: weight decay and learning rate of each tensor.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainctl.config.schema import GroupOverride, RunConfig
from trainctl.options.optimizer import spec_of
from trainctl.plan import mup, shapes
from trainctl.plan.mup import TensorKind
from trainctl.plan.shapes import TensorShape
from trainctl.plan.trainable import trainable


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
    """Limit of the group's own gradient norm; 0 for no limit of its own."""

    def name(self, config: RunConfig) -> str:
        """Return a name unique among the groups of a config, and the same on every layout."""
        words = ["muon" if self.uses_muon else "decayed" if self.is_decayed else "undecayed"]
        if self.lr_factor != 1:
            words.append(f"lr x{self.lr_factor:.6g}")
        if self.weight_decay != (config.optimizer.weight_decay if self.is_decayed else 0.0):
            words.append(f"decay {self.weight_decay:.6g}")
        if self.clip_at:
            words.append(f"clip {self.clip_at:.6g}")
        return ", ".join(words)

    def peak_lr(self, config: RunConfig) -> float:
        """Return the group's learning rate at the peak of the schedule."""
        return _base_lr(config, uses_muon=self.uses_muon) * self.lr_factor


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

    def peak_lr(self, config: RunConfig) -> float:
        """Return the group's learning rate at the peak of the schedule."""
        return _base_lr(config, uses_muon=self.uses_muon) * self.lr_factor


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
        for key in in_order(members)
    )


def in_order(keys: Iterable[GroupKey]) -> list[GroupKey]:
    """Return the keys in the order of the optimizer's groups: Muon's, the decayed, the others."""

    def place(key: GroupKey) -> tuple[bool, bool, float, float, float]:
        numbers = (-key.lr_factor, -key.weight_decay, key.clip_at)
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
    kind = mup.kind_of(name, tuple(shape))
    if embedding:
        kind = TensorKind.embedding
    elif head and len(shape) > 1:
        kind = TensorKind.output
    elif embedding is not None and kind is TensorKind.embedding:
        kind = TensorKind.output  # tied by its name, but not an embedding
    optimizer, model = config.optimizer, config.model
    override = override_of(config, name)
    is_decayed = kind in (TensorKind.hidden, TensorKind.output) or (
        kind is TensorKind.embedding and optimizer.decay_embeddings
    )
    weight_decay = optimizer.weight_decay if is_decayed else 0.0
    if override is not None and override.weight_decay is not None:
        weight_decay = override.weight_decay
    lr_factor = (
        (override.lr_factor if override is not None else 1.0)
        * optimizer.layer_lr_decay ** blocks_above(config, name, kind)
        * mup.lr_factor(model, optimizer, kind)
    )
    clip_at = override.gradient_clipping if override is not None else None
    return GroupKey(
        clip_at=clip_at or 0.0,
        uses_muon=(
            spec_of(optimizer).has_matrix_rule
            and kind is TensorKind.hidden
            and len(shape) == 2  # a tensor that stacks experts is not a matrix
        ),
        is_decayed=is_decayed,
        lr_factor=lr_factor,
        weight_decay=weight_decay * mup.decay_factor(model, optimizer, kind),
    )


def _base_lr(config: RunConfig, *, uses_muon: bool) -> float:
    own = spec_of(config.optimizer).matrix_rate(config.optimizer) if uses_muon else None
    return config.optimizer.lr if own is None else own


def blocks_above(config: RunConfig, name: str, kind: TensorKind) -> int:
    """Return the blocks between a tensor and the output: all for embeddings, 0 for the last
    norm.
    """
    block = shapes.block_of(name)
    if block is not None:
        return max(0, config.model.num_layers - 1 - block)
    return config.model.num_layers if kind is TensorKind.embedding else 0


def override_of(config: RunConfig, name: str) -> GroupOverride | None:
    """Return the first entry of `optimizer.groups` whose pattern matches the name, or None."""
    for entry in config.optimizer.groups:
        if re.search(entry.match, name):
            return entry
    return None
