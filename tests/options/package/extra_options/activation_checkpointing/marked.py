"""Recomputes blocks from their inputs, with a mark around it in a profile."""

from __future__ import annotations

from typing import Any

from trainctl.options.activation_checkpointing import (
    COMPILER_KEEPS,
    ActivationCheckpointing,
    Recomputing,
)


def build() -> tuple[Any, Any]:
    """Return the contexts of a block's forward pass and of its recomputation."""
    from contextlib import nullcontext

    from torch.profiler import record_function

    return nullcontext(), record_function("recomputed")


SPEC = ActivationCheckpointing(
    name="marked",
    keys=Recomputing,
    build="extra_options.activation_checkpointing.marked:build",
    why_not={"blocks": "the mark would be compiled away", "deepcompile": COMPILER_KEEPS},
)
