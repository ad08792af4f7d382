"""Trained parts of a block, which decide how much is kept for the backward pass.

A matrix product keeps its input only for the gradient of its weight; the gradient of the input
needs only the weight. So a frozen linear layer keeps nothing, and a frozen layer with an adapter
keeps what the adapter's two products need.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.options.model import Family, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableBlock:
    """Trained parts of a block."""

    weights: frozenset[str]
    """Names of the block's own trained parameters, relative to the block."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Linear layers of the block that have an adapter, each with the adapter's rank."""
    dropout: bool = False
    """Whether dropout is applied to the adapters' input, which is then a separate copy."""
    magnitudes: bool = False
    """Whether layer plus adapter outputs are scaled by a trained vector (DoRA), and so kept."""
    begins: bool = False
    """Whether nothing before the block is trained, so that the block's input has no gradient."""
    keeps_inputs: bool = False
    """Whether linear layers always keep their inputs, as DeepSpeed's does at ZeRO 3
    (`LinearFunctionForZeroStage3`, zero/linear.py).
    """

    def norm(self, name: str) -> bool:
        """Return True if the weight of the norm is trained, so that the scaled values are kept."""
        return f"{name}.weight" in self.weights

    def readers(self, region: Region) -> int:
        """Return the number of layers that keep the input of a region."""
        return sum(self.reads(f"{region.module}.{name}") for name in region.columns)

    def reads(self, layer: str) -> bool:
        """Return True if the linear layer keeps its input."""
        own = self.keeps_inputs or f"{layer}.weight" in self.weights
        return own or (layer in dict(self.ranks) and not self.dropout)

    def adapters(self, region: Region) -> tuple[tuple[str, int], ...]:
        """Return the layers of a region that have an adapter, each with the adapter's rank."""
        names = [f"{region.module}.{name}" for name in (*region.columns, region.row)]
        return tuple((name, rank) for name, rank in self.ranks if name in names)


def everything(spec: Family) -> TrainableBlock:
    """Return the `TrainableBlock` of a block that is trained whole."""
    names = set()
    for part in spec.block:
        if isinstance(part, Region):
            layers = (*part.columns, part.row, *part.per_head)
            names |= {f"{part.module}.{name}.weight" for name in layers}
        else:
            names.add(f"{part}.weight")
    return TrainableBlock(weights=frozenset(names))
