"""Conditions on a configuration under which it needs a change to, or an internal of, another
package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainctl.config.schema import (
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.options.activation_checkpointing import recomputed, selective
from trainctl.options.adapter import low_rank
from trainctl.options.data import spec_of
from trainctl.options.engine import engine_of, fsdp2
from trainctl.options.optimizer import adamw_8bit
from trainctl.options.precision import loss_scaling
from trainctl.plan.mixture import sources_of


@dataclass(frozen=True, slots=True)
class Need:
    """Condition on a configuration."""

    key: str
    """Configuration key that decides; empty if the condition always holds."""
    holds: Callable[[RunConfig], bool]
    """Returns True if a configuration meets the condition."""


ALWAYS = Need("", lambda config: True)

CHAT = Need(
    "data.kind",
    lambda config: any(spec_of(each).encoder for each in sources_of(config.data).values()),
)

DEEPSPEED_JSON = Need("engine.kind", lambda config: engine_of(config).takes_json)
FSDP2 = Need("engine.kind", lambda config: config.engine.kind == fsdp2.SPEC.name)

STAGES_1_2 = Need("zero_stage.stage", lambda config: config.zero_stage.stage in (1, 2))
STAGE_3 = Need("zero_stage.stage", lambda config: config.zero_stage.stage == 3)
PARTITIONED = Need("zero_stage.stage", lambda config: config.zero_stage.stage > 0)

OPTIMIZER_ON_HOST = Need(
    "offload.optimizer",
    lambda config: (
        config.zero_stage.stage < 3 and config.offload.optimizer is not OffloadDevice.none
    ),
)
OPTIMIZER_ON_NVME = Need(
    "offload.optimizer", lambda config: config.offload.optimizer is OffloadDevice.nvme
)
PARAMETERS_ON_NVME = Need(
    "offload.parameters", lambda config: config.offload.parameters is OffloadDevice.nvme
)
PART_OFFLOADED = Need("offload.ratio", lambda config: config.offload.ratio < 1)
ZENFLOW = Need("offload.zenflow", lambda config: config.offload.zenflow)

PIPELINE = Need("parallelism.pipeline", lambda config: config.parallelism.pipeline > 1)
SPARSE = Need("model.num_experts", lambda config: (config.model.num_experts or 1) > 1)
EXPERTS = Need("parallelism.expert", lambda config: config.parallelism.expert > 1)
OWN_NORM = Need(
    "parallelism", lambda config: config.parallelism.pipeline > 1 or config.parallelism.expert > 1
)
SEQUENCE = Need("parallelism.sequence", lambda config: config.parallelism.sequence > 1)
ADAPTED = Need("adapter.kind", lambda config: low_rank(config.adapter) is not None)
TENSOR = Need("parallelism.tensor", lambda config: config.parallelism.tensor > 1)

RECOMPUTED = Need(
    "activation_checkpointing.mode",
    lambda config: recomputed(config) is not None,
)
SELECTIVE = Need(
    "activation_checkpointing.mode",
    lambda config: config.activation_checkpointing.mode == selective.SPEC.name,
)
LIGER_LOSS = Need(
    "kernels.cross_entropy",
    lambda config: config.kernels.cross_entropy is CrossEntropyKind.liger_fused,
)
FP16 = Need("precision.compute", lambda config: loss_scaling(config) is not None)
EIGHT_BIT_MOMENTS = Need(
    "optimizer.kind", lambda config: config.optimizer.kind == adamw_8bit.SPEC.name
)
MUP = Need("model.mup", lambda config: config.model.mup)
