"""Inputs of the memory phases of one rank of a pipeline stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from trainctl.memory.activations import StageActivations, compute_bytes, stage_activations
from trainctl.memory.components import Components
from trainctl.memory.constants import LOGIT_BYTES, LogitBytes
from trainctl.memory.engine import EngineMemory
from trainctl.memory.groups import Group
from trainctl.memory.stages import Stage
from trainctl.options.activation_checkpointing import recomputed
from trainctl.plan.types import LayoutPlan


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Inputs of the memory phases of one rank of a pipeline stage."""

    plan: LayoutPlan
    engine: EngineMemory
    stage: Stage
    """Pipeline stage with its tensors on this rank."""
    groups: tuple[Group, ...]
    """Parameter groups of the optimizer on this stage."""
    activations: StageActivations
    """Activations of the stage's blocks."""
    logit_bytes: LogitBytes
    """Bytes per logit that the loss holds."""
    resident: Components
    """Permanent memory after the first step."""

    @cached_property
    def trained(self) -> Stage:
        """Stage without its frozen tensors."""
        return self.stage.trained

    @property
    def recomputes(self) -> bool:
        return recomputed(self.plan.config) is not None

    @property
    def busiest(self) -> int:
        """Largest number of elements that the optimizer updates at once."""
        return max((self.engine.sub_group(group) for group in self.groups), default=0)

    @property
    def update(self) -> int:
        """Bytes of the update's temporary copies in the parameter group that makes the most."""
        return max((self.engine.update_bytes(group) for group in self.groups), default=0)


def rank_memory(
    plan: LayoutPlan,
    engine: EngineMemory,
    stage: Stage,
    resident: Components,
    logit_bytes: LogitBytes | None = None,
) -> RankMemory:
    """Build the inputs of a rank's phases. `logit_bytes` is None for trainctl's plain loss."""
    micro_batches = plan.batch.gradient_accumulation_steps
    return RankMemory(
        plan=plan,
        engine=engine,
        stage=stage,
        groups=engine.groups(stage),
        activations=stage_activations(
            plan,
            blocks=stage.blocks,
            in_flight=min(micro_batches, plan.mesh.pipeline - stage.index),
            element=compute_bytes(plan),
            autocast=engine.autocast,
            traced=stage.traced,
            learning=stage.learning,
        ),
        logit_bytes=logit_bytes or LOGIT_BYTES[compute_bytes(plan)],
        resident=resident,
    )
