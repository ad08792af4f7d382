"""Each recomputed block keeps what is costly to compute (arXiv:2205.05198)."""

from __future__ import annotations

from trainctl.options.activation_checkpointing import (
    COMPILER_KEEPS,
    ActivationCheckpointing,
    Recomputing,
)

SPEC = ActivationCheckpointing(
    name="selective",
    keys=Recomputing,
    build="trainctl.train.models.selective:selective_dispatch_modes",
    keeps_products=True,
    why_not={"deepcompile": COMPILER_KEEPS},
)
