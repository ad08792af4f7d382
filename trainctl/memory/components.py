"""Components of a device's memory, and arithmetic on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Memory of one device at one moment, in bytes by component."""

    parameters: int = 0
    """Weights that the model computes with; at ZeRO-3 the local shard."""
    gradients: int = 0
    """Accumulated gradients, and the gradient being computed."""
    master_weights: int = 0
    """Weights that the optimizer updates, if they are a separate copy."""
    optimizer_states: int = 0
    weight_average: int = 0
    """Moving average of the master weights, in fp32."""
    activations: int = 0
    """Activations kept for the backward pass or recomputed, and their gradients."""
    logits: int = 0
    """Logits and the loss's copies of them."""
    communication_buffers: int = 0
    """Buckets of gradients in communication."""
    gathered_parameters: int = 0
    """Gathered weights at ZeRO-3, including the persistent ones."""
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
        """Bytes of the components whose lifetimes the phases simplify."""
        return self.activations + self.logits + self.gathered_parameters + self.retained_weights

    def plus(self, **extra: int) -> Components:
        """Return these components with `extra` bytes added to some of them.

        Raises:
            KeyError: A name in `extra` is no component.
        """
        unknown = extra.keys() - NAMES
        if unknown:
            raise KeyError(f"no such component: {sorted(unknown)}")
        return replace(self, **{name: getattr(self, name) + size for name, size in extra.items()})

    def to_json(self) -> dict[str, int]:
        """Return the bytes by component, in the order of the schema."""
        return {name: getattr(self, name) for name in NAMES}


NAMES = tuple(item.name for item in fields(Components))
"""Names of the components, from the bottom of a stacked bar to its top."""

PHASES = ("load", "forward_end", "backward_start", "backward_end", "step")
"""Moments at which a device can be at its fullest, in the order of a step."""


def fullest(moments: Mapping[str, Components]) -> str:
    """Return the name of the moment with the most memory; the first if several are equal."""
    return max(moments, key=lambda name: moments[name].total)
