"""No recomputation: every activation is kept."""

from __future__ import annotations

from trainctl.config.schema import ActivationCheckpointingConfig
from trainctl.options.activation_checkpointing import ActivationCheckpointing

SPEC = ActivationCheckpointing(name="none", keys=ActivationCheckpointingConfig)
