"""What a kind of activation checkpointing says of itself: what it keeps, and what it goes with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainctl.config.registry import Spec, load, specs
from trainctl.config.schema import ActivationCheckpointingConfig, RunConfig
from trainctl.config.schema.option import option


@dataclass
class Recomputing(ActivationCheckpointingConfig):
    """Of kinds that compute blocks again."""

    every_kth_block: int = option(
        1, "Recompute the first of every k blocks, and keep the others whole.", minimum=1
    )
    offload_to_cpu: bool = option(
        False, "Keep the inputs of recomputed blocks in (pinned) host memory."
    )
    partition_across_tensor_ranks: bool = option(
        False, "Keep of them a slice on each tensor-parallel rank, gathered when needed."
    )


@dataclass(frozen=True, kw_only=True)
class ActivationCheckpointing(Spec):
    """What is kept of a block for its backward pass.

    `build` takes nothing, and gives the contexts in which torch's checkpoint runs a block at first
    and again.
    """

    keeps_products: bool = False
    """Whether, of a block that is computed again, what its products with weights and its attention
    gave is kept beside the input: the rest is computed from it."""
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Reasons, by the name of a `kernels.compile` that it does not go with."""

    @property
    def recomputes(self) -> bool:
        """Whether anything is computed again."""
        return issubclass(self.keys, Recomputing)


def checkpointing_of(section: ActivationCheckpointingConfig) -> ActivationCheckpointing:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("activation_checkpointing", section.mode)
    assert isinstance(spec, ActivationCheckpointing)
    return spec


def recomputed(config: RunConfig) -> Recomputing | None:
    """What a configuration says of the blocks that are computed again; None where none are."""
    section = config.activation_checkpointing
    return section if isinstance(section, Recomputing) else None


def by_what_they_keep() -> tuple[ActivationCheckpointing, ...]:
    """Return all kinds; the one that keeps least, and computes most again, first."""

    def kept(spec: ActivationCheckpointing) -> tuple[bool, bool]:
        return not spec.recomputes, spec.keeps_products

    return tuple(sorted(specs("activation_checkpointing"), key=kept))


COMPILER_KEEPS = "the compiler decides itself what the backward pass keeps"
