"""The frozen plan and its parts: what every other room reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from trainctl.config.derived import Derived
from trainctl.config.schema import RunConfig
from trainctl.hardware import Hardware
from trainctl.plan.batches import Batch as Batch
from trainctl.plan.batches import Batches, BatchPhase

PLAN_SCHEMA = 1
"""Version of `plan.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the process mesh; `world_size` is the product of data, tensor, pipeline, sequence.

    Ranks are ordered with tensor fastest, then sequence, then data, then pipeline slowest, so that
    a tensor-parallel group stays inside a node. The expert axis is a part of the data axis, and
    its ranks lie next to each other there.
    """

    data: int
    tensor: int
    pipeline: int
    sequence: int
    expert: int = 1

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that have the same experts."""
        return self.data * self.sequence // self.expert

    @property
    def world_size(self) -> int:
        return self.data * self.tensor * self.pipeline * self.sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Sketch:
    """As much of a plan as the memory of its devices and the time of its steps follow from."""

    config: RunConfig
    """The configuration as composed (derived values are not written back into it)."""
    hardware: Hardware
    """Machines and devices, declared or detected."""
    mesh: Mesh
    batch: Batch
    """Batch arithmetic; with a ramp that of the steps after it."""
    stage_blocks: tuple[int, ...] = ()
    """Number of blocks of each pipeline stage."""

    @property
    def stages(self) -> tuple[range, ...]:
        """Indices of the blocks of each pipeline stage."""
        ends = tuple(accumulate(self.stage_blocks))
        return tuple(
            range(end - size, end) for end, size in zip(ends, self.stage_blocks, strict=True)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(Sketch):
    """Everything that a launch will do; written to `plan.json` and only read afterwards."""

    total_steps: int
    """Optimizer steps of the whole run."""
    stop_step: int
    """Step at which this launch ends; equals total_steps unless `training.stop_after_steps` is
    set."""
    warmup_steps: int
    """Optimizer steps of the linear warmup."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """The JSON of the engine of that name, complete, without "auto"; of another, empty."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What another engine than DeepSpeed is told, nested."""
    ramp: tuple[BatchPhase, ...] = ()
    """Batch sizes of the run by their first step, the last of them `batch`; empty if all steps have
    it."""
    derived: tuple[Derived, ...] = ()
    """Every derived value with its reason."""
    not_yet: tuple[str, ...] = ()
    """What this plan asks for that cannot be trained with yet, in words; `launch` refuses while it
    is not empty."""
    lr_scale: float = 1.0
    """What `optimizer.lr_scaling` makes of the learning rates."""
    engine: str = "deepspeed"
    """What makes the steps: an option of the group `engine`."""
    schema: int = field(default=PLAN_SCHEMA)

    @property
    def peak_lr(self) -> float:
        """The base learning rate where the schedule is at its peak."""
        return self.config.optimizer.lr * self.lr_scale

    @property
    def batches(self) -> Batches:
        """The batch of every step."""
        return Batches.of(self.ramp, self.batch)
