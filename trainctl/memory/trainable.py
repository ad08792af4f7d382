"""Which parts of a block learn: what decides how much of it is kept for the backward pass.

A product with a weight keeps its input for the gradient of that weight alone: for the gradient of
the input the weight is enough. So a frozen linear layer keeps nothing, and one with an adapter
what the adapter's two products keep.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.options.model import Family, Region


@dataclass(frozen=True, slots=True, kw_only=True)
class Learning:
    """What learns in a block."""

    weights: frozenset[str]
    """Parameters of the block's own that do, by their names in it."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Names of linear layers in the block that have an adapter, and its rank."""
    dropout: bool = False
    """Whether an adapter's input is dropped out, so that it is a copy of its own."""
    magnitudes: bool = False
    """Whether the sum of a layer's and its adapter's outputs is scaled by what learns (DoRA), and
    so kept."""
    begins: bool = False
    """Whether nothing before it learns, so that its input has no gradient."""
    keeps_inputs: bool = False
    """Whether linear layers keep their inputs whatever learns, as DeepSpeed's does at ZeRO 3
    (`LinearFunctionForZeroStage3`, zero/linear.py)."""

    def norm(self, name: str) -> bool:
        """Whether the weight of a norm learns, and so the scaled values that meet it are kept."""
        return f"{name}.weight" in self.weights

    def readers(self, region: Region) -> int:
        """Layers that keep what enters a region."""
        return sum(self.reads(f"{region.module}.{name}") for name in region.columns)

    def reads(self, layer: str) -> bool:
        """Whether a linear layer keeps its input."""
        own = self.keeps_inputs or f"{layer}.weight" in self.weights
        return own or (layer in dict(self.ranks) and not self.dropout)

    def adapters(self, region: Region) -> tuple[tuple[str, int], ...]:
        """Return names of the layers of a region that have an adapter, and its rank."""
        names = [f"{region.module}.{name}" for name in (*region.columns, region.row)]
        return tuple((name, rank) for name, rank in self.ranks if name in names)


def everything(spec: Family) -> Learning:
    """Return all of a block, as when a model is trained whole."""
    names = set()
    for part in spec.block:
        if isinstance(part, Region):
            layers = (*part.columns, part.row, *part.per_head)
            names |= {f"{part.module}.{name}.weight" for name in layers}
        else:
            names.add(f"{part}.weight")
    return Learning(weights=frozenset(names))
