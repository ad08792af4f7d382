"""Selection of the decoder blocks that are recomputed in the backward pass."""

from __future__ import annotations

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig
from trainctl.options.activation_checkpointing import Recomputing, recomputed


def is_wrapped(block: int, settings: Recomputing) -> bool:
    """Return True if a block, counted from 0 over the whole model, is recomputed.

    The first block of every k is. The last block is then kept whole: its backward pass comes when
    memory is fullest and would need its activations again at once.
    """
    return block % settings.every_kth_block == 0


def wrapped_blocks(config: RunConfig) -> tuple[Derived, ...]:
    """Return the number of recomputed blocks; empty if recomputation is off."""
    settings, layers = recomputed(config), config.model.num_layers
    if settings is None:
        return ()
    count = sum(is_wrapped(block, settings) for block in range(layers))
    which = "all" if settings.every_kth_block == 1 else f"one in {settings.every_kth_block}"
    return (
        Derived(
            key="activation_checkpointing.wrapped_blocks",
            value=count,
            reason=f"activation_checkpointing.mode={settings.mode}: {which} of {layers}",
            sources=("activation_checkpointing.mode",),
        ),
    )
