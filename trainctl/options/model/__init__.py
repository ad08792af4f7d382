"""What a model family says of itself: facts of its decoder, as transformers builds it.

Shapes, memory, operations, rules and the ranks' code follow from these facts; none of them asks
which family it is. Names are transformers' own. A decoder that the facts do not describe is what
its directory says, traced (`hf`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainctl.config.registry import Spec, load, specs
from trainctl.config.schema import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm of transformers' modelling code."""

    has_bias: bool
    copies_in_fp32: bool
    """Whether it keeps its input in fp32 and the scaled values in the input's type; otherwise it
    keeps its input alone."""
    statistics: int
    """fp32 numbers per token that it keeps: the root mean square, or mean and deviation."""
    moved: int
    """Bytes that it reads and writes for an element of two bytes."""
    moved_fused: int = 4
    """The same as one kernel."""


RMS_NORM = Norm(has_bias=False, copies_in_fp32=True, statistics=1, moved=36)
LAYER_NORM = Norm(has_bias=True, copies_in_fp32=False, statistics=2, moved=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What lies between the projections of a feed-forward layer."""

    kept: int
    """Elements that it keeps for each one of the layer's width."""
    kept_by_liger: int
    """The same with Liger's kernel."""
    moved: int
    """Bytes that it reads and writes for an element of two bytes."""
    moved_fused: int
    """The same as one kernel."""


SWIGLU = Activation(kept=4, kept_by_liger=3, moved=10, moved_fused=6)
"""silu(gate) * up: both of them, the silu, and the product; Liger's computes the silu again."""

GELU_TANH = Activation(kept=5, kept_by_liger=5, moved=36, moved_fused=4)
"""gelu_new keeps its input, half of it, the tanh, one plus the tanh; and there is the result."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of a block whose matrices are split over the tensor ranks (arXiv:1909.08053)."""

    module: str
    """The module, in the block; its input enters the region."""
    columns: tuple[str, ...]
    """Linear layers in it that are split by outputs. Of attention: those of queries, keys and
    values, or one of all three; of a feed-forward layer: gate and up, or up alone."""
    row: str
    """The one that is split by inputs; its output leaves the region."""
    fused: int = 1
    """Matrices that lie side by side in each of `columns`."""
    per_head: tuple[str, ...] = ()
    """Norms in it as wide as a head, which every rank has whole and uses for its own heads only: of
    the queries first."""
    widths: tuple[str, ...] = ()
    """Attributes of the module that hold a width and are divided."""
    column_bias: bool = False
    """Whether `columns` have biases."""
    row_bias: bool = False
    """Whether `row` has one."""
    across_heads: tuple[str, ...] = ()
    """Norms in it as wide as all heads of its queries or keys together."""
    values: tuple[str, ...] = ()
    """Parameters in it that have one number for each head."""
    is_uneven: bool = False
    """Whether what lies side by side in its one column is queries, and fewer keys and values."""
    is_experts: bool = False
    """Whether columns and row are experts' parameters, one matrix an expert, and not layers;
    weights of the routing enter the region beside the hidden states."""

    @property
    def matrices(self) -> int:
        """Matrices that are split by outputs, those side by side one by one."""
        return len(self.columns) * self.fused


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """How a transformers directory, by its config.json, is of a family."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values, by key of ours: what transformers' configuration class takes where the file has
    none."""
    plain: Mapping[str, Any] = field(default_factory=dict)
    """Values, by key of the file: the one value that the family has. Another one makes the model
    another architecture."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Names, by key of ours: the key of the file that turns it on. That makes it another
    architecture too; without it the key is null."""


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
"""Keys of the shape, and what most configurations of transformers call them."""

AXES = ("tensor", "pipeline", "sequence")
"""Axes of parallelism, besides the data's, that need to know where things are in a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Spec):
    """What one kind of decoder is, allows and lacks.

    `name` is transformers' `model_type` too, and `build` makes its configuration. Keys of its own,
    beside the shape that all have, are called there as they are here.
    """

    build: str = "trainctl.train.models.model:shape_config"
    arguments: Mapping[str, str] = field(default_factory=lambda: SHAPE)
    """Keys of the shape that it has, and what transformers' configuration calls them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What else that is told."""
    decoder: str
    """The decoder, in the model with its head."""
    embedding: str
    """Token embedding, in the decoder."""
    positions: str | None = None
    """Learned position embedding, in the decoder; None has rotary positions."""
    blocks: str
    """List of the blocks, in the decoder."""
    block: tuple[str | Region, ...]
    """Norms and regions of a block, in transformers' order; attention is the first region, the
    feed-forward layer the second."""
    final_norm: str
    """Norm after the last block, in the decoder."""
    head: str = "lm_head"
    """Output projection, in the model."""
    norm: Norm = RMS_NORM
    """Kind of its norms."""
    activation: Activation = SWIGLU
    """Function of the feed-forward layer."""
    inputs_first: bool = False
    """Whether a matrix has a row for each input: transformers' Conv1D."""
    has_equal_heads: bool = False
    """Whether each query head has keys and values of its own, and the heads share hidden_size
    evenly."""
    has_window: bool = False
    """Whether attention may slide, by `sliding_window`."""
    softmax_in_fp32: bool = True
    """Whether eager attention computes its probabilities in fp32."""
    is_directory: bool = False
    """Whether it is what a transformers directory says, and no shape of ours."""
    directory: Directory = Directory()
    """How a directory is of this family."""
    axes: tuple[str, ...] = AXES
    """Axes of parallelism that may cut it."""
    has_mup: bool = False
    """Whether muP's table holds: attention's factor is its `scaling`, and the head's input may be
    multiplied."""
    has_liger: bool = False
    """Whether Liger has kernels for its blocks."""
    has_plain_head: bool = True
    """Whether a product is all between the last hidden states and the logits."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the name of an axis that may not cut it."""

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
        """Whether queries and keys are turned by their positions."""
        return self.positions is None

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Modules of the decoder that are looked up: by token, and by position if they are."""
        return (self.embedding, self.positions) if self.positions else (self.embedding,)


def spec_of(model: ModelConfig) -> Family:
    """Of the family that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("model", model.family)
    assert isinstance(spec, Family)
    return spec


def families() -> tuple[Family, ...]:
    """Those with a shape of ours, by name."""
    return tuple(spec for spec in specs("model") if not spec.is_directory)


def architecture(model: ModelConfig) -> Family | None:
    """Return the family that a model's architecture is, whoever said its shape; None of others.

    A directory may be of a family's architecture and not of its plain form.
    """
    spec = spec_of(model)
    return of_type(model.model_type or "") if spec.is_directory else spec


def of_type(model_type: str) -> Family | None:
    """Return the family of transformers' name of an architecture, if one is known."""
    return next((spec for spec in families() if spec.name == model_type), None)
