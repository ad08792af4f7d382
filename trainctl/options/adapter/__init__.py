"""What an adapter says of itself: the tensors that it adds to a linear layer, and how it scales.

With an adapter the weights of the model itself stay as they are, and what it adds to chosen linear
layers trains (arXiv:2106.09685): W x becomes W x + s B A x, with A of (rank, inputs), B of
(outputs, rank) and the factor s by which kinds differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.registry import Spec, load
from trainctl.config.schema import AdapterConfig
from trainctl.config.schema.option import option


class BaseWeights(Enum):
    """How the frozen matrices beside an adapter are held."""

    compute = "compute"
    int8 = "int8"
    nf4 = "nf4"
    nf4_double = "nf4_double"


@dataclass
class LowRank(AdapterConfig):
    """Of what adds a product of two narrow matrices."""

    rank: int = option(8, "Rows of A and columns of B.", minimum=1, maximum=65_536)
    alpha: float = option(
        16.0,
        "What is added is multiplied by alpha / rank; by alpha / sqrt(rank) for rslora.",
        above=0,
    )
    targets: list[str] = option(
        [],
        "Linear layers of the blocks, by how their names end; empty: all of them.",
        example="[q_proj, v_proj]",
    )
    dropout: float = option(
        0.0,
        "Share of an adapter's inputs that is zero in a training step; the layer's own are whole.",
        minimum=0,
        maximum=0.9,
    )
    also_train: list[str] = option(
        [],
        "Parameters of the model's own that train beside the adapter, as training.freeze names "
        "what does not: the rows of new tokens, with all others of embeddings and head.",
        example="[embeddings, head]",
    )
    base_weights: BaseWeights = option(
        BaseWeights.compute,
        "How the blocks' frozen linear layers are held: in the type that computes, in 8 bits, or "
        "in 4 (QLoRA, arXiv:2305.14314), whose scales nf4_double holds in 8. They are expanded "
        "where they are used.",
    )

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen matrices take fewer bits than what computes with them."""
        return self.base_weights is not BaseWeights.compute


@dataclass(frozen=True, kw_only=True)
class Adapter(Spec):
    """What is added to a linear layer.

    `build` is called on a rank with the skeleton and the section, and adds it.
    """

    rank_power: float = 1.0
    """What is added is multiplied by alpha / rank ** rank_power."""
    has_magnitude: bool = False
    """Whether each row of the sum is scaled to a length that trains (arXiv:2402.09353)."""

    def scale(self, section: LowRank) -> float:
        """What the product of the two matrices is multiplied by."""
        return float(section.alpha / section.rank**self.rank_power)


def spec_of(section: AdapterConfig) -> Adapter:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("adapter", section.kind)
    assert isinstance(spec, Adapter)
    return spec


def low_rank(section: AdapterConfig) -> LowRank | None:
    """What a configuration says of an adapter; None where it has none."""
    return section if isinstance(section, LowRank) else None
