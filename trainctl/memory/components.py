"""The parts of a device's memory, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Bytes on one device at one moment."""

    parameters: int = 0
    """Weights that the model computes with; the ZeRO-3 shard of them."""
    gradients: int = 0
    """Accumulated gradients, and the one being computed."""
    master_weights: int = 0
    """The copy that the optimizer updates."""
    optimizer_states: int = 0
    weight_average: int = 0
    """Moving average of the master weights, in fp32."""
    activations: int = 0
    """Kept for the backward pass, recomputed, or gradients of activations."""
    logits: int = 0
    """Logits and the loss's copies of them."""
    communication_buffers: int = 0
    """Buckets of gradients on their way."""
    gathered_parameters: int = 0
    """Whole weights at ZeRO-3, those that always stay whole included."""
    retained_weights: int = 0
    """Gathered or cast weights that autograd keeps until the backward pass."""
    step_transient: int = 0
    """Copies made while the optimizer updates, or while the engine is built."""
    runtime: int = 0
    """Driver context, communication library, workspaces of libraries."""

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in NAMES)

    @property
    def allocated(self) -> int:
        """Bytes in tensors: everything but the runtime."""
        return self.total - self.runtime

    @property
    def estimated(self) -> int:
        """Bytes of the parts whose lifetimes are simplified."""
        return self.activations + self.logits + self.gathered_parameters + self.retained_weights

    def plus(self, **extra: int) -> Components:
        """Return a moment with more of some parts."""
        unknown = extra.keys() - NAMES
        if unknown:
            raise KeyError(f"no such component: {sorted(unknown)}")
        return replace(self, **{name: getattr(self, name) + size for name, size in extra.items()})

    def to_json(self) -> dict[str, int]:
        """Name to bytes, in the order of the schema."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(item.name for item in fields(Components))
"""Of the parts, from the bottom of a bar to its top."""

PHASES = ("load", "forward_end", "backward_start", "backward_end", "step")
"""The moments at which a device can be at its fullest, in the order of a step."""


def fullest(moments: Mapping[str, Components]) -> str:
    """Name of the moment with most memory; the first of equals."""
    return max(moments, key=lambda name: moments[name].total)
