"""Each recomputed block keeps its input only (arXiv:1604.06174)."""

from __future__ import annotations

from trainctl.options.activation_checkpointing import (
    COMPILER_KEEPS,
    ActivationCheckpointing,
    Recomputing,
)

SPEC = ActivationCheckpointing(
    name="full",
    keys=Recomputing,
    build="torch.utils.checkpoint:noop_context_fn",
    why_not={"deepcompile": COMPILER_KEEPS},
)
