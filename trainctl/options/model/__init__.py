"""Specification of a model family: facts about its decoder as transformers builds it.

Shapes, memory, operation counts, rules and the ranks' code follow from these facts, and none of
them depends on the family's name. Names are transformers' own. A decoder that the facts do not
describe is traced from its directory (`hf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainctl.config.registry import Spec, load_specs, spec_lookup
from trainctl.config.schema import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of transformers' modelling code."""

    has_bias: bool
    copies_in_fp32: bool
    """Whether it saves its input in fp32 and the scaled values in the input's type for the backward
    pass; otherwise it saves its input alone.
    """
    statistics: int
    """fp32 numbers per token that it saves: the root mean square, or mean and deviation."""
    moved: int
    """Bytes read and written per element of two bytes."""
    moved_fused: int = 4
    """Bytes read and written per element of two bytes by a single kernel."""


RMS_NORM = Norm(has_bias=False, copies_in_fp32=True, statistics=1, moved=36)
LAYER_NORM = Norm(has_bias=True, copies_in_fp32=False, statistics=2, moved=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """Activation function between the projections of a feed-forward layer."""

    kept: int
    """Elements saved for the backward pass, per element of the layer's width."""
    saved_by_liger: int
    """Elements that Liger's kernel saves, per element of the layer's width."""
    moved: int
    """Bytes read and written per element of two bytes."""
    moved_fused: int
    """Bytes read and written per element of two bytes by a single kernel."""


SWIGLU = Activation(kept=4, saved_by_liger=3, moved=10, moved_fused=6)
"""silu(gate) * up saves gate, up, the silu, and the product; Liger's kernel recomputes the silu."""

GELU_TANH = Activation(kept=5, saved_by_liger=5, moved=36, moved_fused=4)
"""gelu_new saves its input, half of the input, the tanh, one plus the tanh, and the result."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a block whose matrices are split over the tensor ranks (arXiv:1909.08053)."""

    module: str
    """The module in the block; its input enters the region."""
    columns: tuple[str, ...]
    """Linear layers in it that are split by outputs. In attention: queries, keys and values, or one
    layer for all three. In a feed-forward layer: gate and up, or up alone.
    """
    row: str
    """Linear layer that is split by inputs; its output leaves the region."""
    fused: int = 1
    """Number of matrices that lie side by side in each of `columns`."""
    per_head: tuple[str, ...] = ()
    """Norms as wide as one head, the queries' norm first. Every rank holds them whole and uses them
    for its own heads only.
    """
    widths: tuple[str, ...] = ()
    """Attributes of the module that hold a width, to be divided by the number of tensor ranks."""
    column_bias: bool = False
    """Whether `columns` have biases."""
    row_bias: bool = False
    """Whether `row` has a bias."""
    across_heads: tuple[str, ...] = ()
    """Norms as wide as all heads of queries or of keys together, the queries' norm first."""
    values: tuple[str, ...] = ()
    """Parameters with one number for each head."""
    is_uneven: bool = False
    """Whether its one column layer holds queries and a smaller number of keys and values side by
    side.
    """
    is_experts: bool = False
    """Whether columns and row are parameters of experts, with one matrix per expert, and not
    layers. Routing weights then enter the region beside the hidden states.
    """

    @property
    def matrices(self) -> int:
        """Number of matrices split by outputs; fused matrices count one by one."""
        return len(self.columns) * self.fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """Relation between a transformers config.json and a family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values, by trainctl's key, that transformers' configuration class takes if the file has
    none.
    """
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Values, by key of the file, that the family requires. With any other value the model is
    another architecture.
    """
    switches: Mapping[str, str] = field(default_factory=dict)
    """Keys of the file, by trainctl's key, that turn trainctl's key on, which makes the model
    another architecture. If the file's key is off, trainctl's key is null.
    """


SHAPE = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Keys of a model's shape, with their names in most configurations of transformers."""

AXES = ("tensor", "pipeline", "sequence", "context")
"""Axes of parallelism, besides data, that depend on a model's structure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Spec):
    """Specification of one kind of decoder: its structure, what it allows and what it lacks.

    `name` is also transformers' `model_type`, and `build` makes its configuration. Keys that only
    this family has are named as in that configuration.
    """

    build: str = "trainctl.train.models.model:shape_config"
    arguments: Mapping[str, str] = field(default_factory=lambda: SHAPE)
    """Keys of the shape that the family has, with their names in transformers' configuration."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of transformers' configuration."""
    decoder: str
    """Name of the decoder, in the model with its head."""
    embedding: str
    """Name of the token embedding, in the decoder."""
    positions: str | None = None
    """Name of the learned position embedding, in the decoder; None for rotary positions."""
    blocks: str
    """Name of the list of blocks, in the decoder."""
    block: tuple[str | Region, ...]
    """Norms and regions of a block, in transformers' order; attention is the first region, the
    feed-forward layer the second."""
    final_norm: str
    """Name of the norm after the last block, in the decoder."""
    head: str = "lm_head"
    """Name of the output projection, in the model."""
    norm: Norm = RMS_NORM
    activation: Activation = SWIGLU
    """Activation function of the feed-forward layer."""
    inputs_first: bool = False
    """Whether the rows of a matrix are its inputs, as in transformers' Conv1D."""
    has_equal_heads: bool = False
    """Whether each query head has its own keys and values, and hidden_size is split evenly over
    the heads.
    """
    has_window: bool = False
    """Whether it supports sliding-window attention (`sliding_window`)."""
    softmax_in_fp32: bool = True
    """Whether eager attention computes its probabilities in fp32."""
    is_directory: bool = False
    """Whether a transformers directory defines the model, rather than shape keys."""
    is_module: bool = False
    """Whether a function of the user's makes it, a torch module that is not transformers'."""
    directory: Directory = Directory()
    """Rules by which a transformers directory is recognised as this family."""
    axes: tuple[str, ...] = AXES
    """Axes of parallelism that may split the model."""
    has_mup: bool = False
    """Whether muP's table holds: attention has a `scaling` factor, and the head's input may be
    multiplied.
    """
    has_liger: bool = False
    """Whether Liger has kernels for its blocks."""
    has_plain_head: bool = True
    """Whether the logits are one matrix product of the last hidden states."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by axis that may not split the model."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """Attention and the feed-forward layer."""
        return tuple(part for part in self.block if isinstance(part, Region))

    @property
    def attention(self) -> Region:
        return self.regions[0]

    @property
    def feed_forward(self) -> Region:
        return self.regions[1]

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys get rotary position embeddings."""
        return self.positions is None

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the decoder's embeddings: tokens, and positions if these are learned."""
        return (self.embedding, self.positions) if self.positions else (self.embedding,)


spec_of = spec_lookup(ModelConfig, Family)
"""Return the family of a model configuration."""


def families() -> tuple[Family, ...]:
    """Return the families that are defined by shape keys, by name."""
    specs = load_specs("model")
    return tuple(spec for spec in specs if not (spec.is_directory or spec.is_module))


def architecture(model: ModelConfig) -> Family | None:
    """Return the family of a model's architecture, also if a directory defines it.

    None if it is unknown, or a module of the user's.

    A directory may have a family's architecture without having its plain form.
    """
    spec = spec_of(model)
    if spec.is_module:
        return None
    return family_of_type(model.model_type or "") if spec.is_directory else spec


def family_of_type(model_type: str) -> Family | None:
    """Return the family with transformers' `model_type`; None if there is none."""
    return next((spec for spec in families() if spec.name == model_type), None)
