"""Specification of activation checkpointing: what it keeps, and what it cannot be combined with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainctl.config.registry import Spec, load_specs, spec_lookup
from trainctl.config.schema import ActivationCheckpointingConfig, RunConfig
from trainctl.config.schema.option import option


@dataclass
class Recomputing(ActivationCheckpointingConfig):
    """Keys of activation checkpointing that recomputes blocks."""

    every_kth_block: int = option(
        1,
        "Recompute the first of every k blocks, and keep the activations of the others.",
        minimum=1,
    )
    offload_to_cpu: bool = option(
        False, "Keep the inputs of recomputed blocks in pinned host memory."
    )
    partition_across_tensor_ranks: bool = option(
        False,
        "Partition the inputs of recomputed blocks over the tensor-parallel ranks, and gather "
        "them when needed.",
    )


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Spec):
    """Specification of one kind of activation checkpointing.

    `build` takes no arguments and returns the contexts in which torch's checkpoint runs a block in
    the forward pass and in recomputation.
    """

    keeps_products: bool = False
    """Whether a recomputed block keeps, beside its input, the outputs of its matrix products with
    weights and of its attention: only the rest is recomputed.
    """
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the value of `kernels.compile` that it cannot be combined with."""

    @property
    def recomputes(self) -> bool:
        """Whether any block is recomputed."""
        return issubclass(self.keys, Recomputing)


checkpointing_of = spec_lookup(ActivationCheckpointingConfig, ActivationCheckpointing)
"""Return the specification of the configured activation checkpointing."""


def recomputing_section(config: RunConfig) -> Recomputing | None:
    """Return the section of recomputed blocks in a configuration; None if there are none."""
    section = config.activation_checkpointing
    return section if isinstance(section, Recomputing) else None


def kinds_by_saved_activations() -> tuple[ActivationCheckpointing, ...]:
    """Return all kinds, ordered from the one that keeps least and recomputes most."""

    def kept(spec: ActivationCheckpointing) -> tuple[bool, bool]:
        return not spec.recomputes, spec.keeps_products

    return tuple(sorted(load_specs("activation_checkpointing"), key=kept))


COMPILER_KEEPS = "the compiler decides itself what the backward pass keeps"
