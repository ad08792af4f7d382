"""One rank of a pipeline stage: what its phases are computed from."""

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
from trainctl.plan.types import Sketch


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """One rank of a stage: what its phases are computed from."""

    plan: Sketch
    engine: EngineMemory
    """The engine of the plan."""
    stage: Stage
    """What the pipeline stage holds."""
    groups: tuple[Group, ...]
    """The optimizer's parameter groups of it."""
    activations: StageActivations
    """Activations of its blocks."""
    logit_bytes: LogitBytes
    """What the loss holds of each logit."""
    resident: Components
    """What is there all the time after the first step."""

    @cached_property
    def trained(self) -> Stage:
        """The stage as its optimizer has it."""
        return self.stage.trained

    @property
    def recomputes(self) -> bool:
        return recomputed(self.plan.config) is not None

    @property
    def busiest(self) -> int:
        """Most elements that the optimizer updates at once."""
        return max((self.engine.sub_group(group) for group in self.groups), default=0)

    @property
    def update(self) -> int:
        """Bytes of the copies that the update makes on the way, in the group that makes most."""
        return max((self.engine.update_bytes(group) for group in self.groups), default=0)


def rank_memory(
    plan: Sketch,
    engine: EngineMemory,
    stage: Stage,
    resident: Components,
    logit_bytes: LogitBytes | None = None,
) -> RankMemory:
    """What the phases of a rank are computed from.

    Args:
        logit_bytes: What the loss holds of each logit; none is trainctl's plain loss.
    """
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
