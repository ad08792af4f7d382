"""Specification of an adapter: the tensors that it adds to a linear layer, and their scale.

With an adapter the model's own weights stay fixed, and additions to selected linear layers are
trained (arXiv:2106.09685): W x becomes W x + s B A x, with A of (rank, inputs), B of (outputs,
rank) and a factor s that depends on the kind of adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import AdapterConfig
from trainctl.config.schema.option import option


class BaseWeights(Enum):
    """Format of the frozen matrices of an adapted model."""

    compute = "compute"
    int8 = "int8"
    nf4 = "nf4"
    nf4_double = "nf4_double"


@dataclass
class LowRank(AdapterConfig):
    """Keys of an adapter that adds a product of two narrow matrices."""

    rank: int = option(
        8, "Rank of the adapter: rows of A and columns of B.", minimum=1, maximum=65_536
    )
    alpha: float = option(
        16.0,
        "Scaling of the adapter: its output is multiplied by alpha / rank; by alpha / sqrt(rank) "
        "for rslora.",
        above=0,
    )
    targets: list[str] = option(
        [],
        "Linear layers and stacked experts of the blocks that get an adapter, by the ends of their "
        "names; experts need two parts, as experts.down_proj. Empty: all linear layers.",
        example="[q_proj, v_proj]",
    )
    dropout: float = option(
        0.0,
        "Dropout rate of the adapter's inputs; the frozen layer's inputs are unaffected.",
        minimum=0,
        maximum=0.9,
    )
    also_train: list[str] = option(
        [],
        "Parameters of the base model to train with the adapter, named as in training.freeze, "
        "such as the rows of new tokens; embeddings and head train with all of their rows.",
        example="[embeddings, head]",
    )
    base_weights: BaseWeights = option(
        BaseWeights.compute,
        "Storage type of the frozen linear layers of the blocks: the compute type, int8, or nf4 "
        "(QLoRA, arXiv:2305.14314), whose scales nf4_double stores in 8 bits. They are "
        "dequantized where they are used.",
    )

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen matrices have fewer bits than the compute format."""
        return self.base_weights is not BaseWeights.compute


@dataclass(frozen=True, kw_only=True)
class Adapter(Spec):
    """Specification of one adapter of linear layers.

    A rank calls `build` with the skeleton and the section; it adds the adapter to the skeleton.
    """

    rank_power: float = 1.0
    """Exponent of the rank in the scale alpha / rank ** rank_power."""
    has_magnitude: bool = False
    """Whether each row of the sum is scaled to a trained length (arXiv:2402.09353)."""

    def scale(self, section: LowRank) -> float:
        """Return the factor of the product of the two matrices."""
        return float(section.alpha / section.rank**self.rank_power)


spec_of = spec_lookup(AdapterConfig, Adapter)
"""Return the specification of the configured adapter."""


def low_rank(section: AdapterConfig) -> LowRank | None:
    """Return the section as the keys of a low-rank adapter; None without an adapter."""
    return section if isinstance(section, LowRank) else None
