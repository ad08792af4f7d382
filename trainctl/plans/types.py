"""The frozen plan and its parts, which all other packages read."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from trainctl.config.derived import DerivedValue
from trainctl.config.schema import OptimizerConfig, RunConfig
from trainctl.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Batch sizes, with global = micro x accumulation x data, in sequences."""

    global_batch_size: int
    """Sequences in an optimizer step."""
    micro_batch_size: int
    """Sequences in one forward pass of a data-parallel rank."""
    gradient_accumulation_steps: int
    """Forward passes in an optimizer step."""
    sequence_length: int
    """Tokens in a sequence."""

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPhase:
    """Range of steps with the same batch size."""

    first_step: int
    """First step of the range, from 0."""
    batch: Batch
    """Batch of each step in the range."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Batch of every step of a run: constant, or with a ramp of smaller ones first.

    It is a function of the step alone, so it is the same on every rank and layout, and after a
    resume.
    """

    phases: tuple[BatchPhase, ...]
    """Phases ascending by their first step, from 0; the last one has no end."""

    @classmethod
    def of(cls, ramp: tuple[BatchPhase, ...], batch: Batch) -> Batches:
        """Return the batches of a ramp that ends in `batch`; without a ramp all steps have it."""
        return cls(ramp or (BatchPhase(first_step=0, batch=batch),))

    def at(self, step: int) -> Batch:
        """Return the batch of update number `step`, from 0."""
        return next(phase.batch for phase in reversed(self.phases) if phase.first_step <= step)

    def samples_before(self, step: int) -> int:
        """Return the number of sequences in all updates before number `step`."""
        return sum(count * batch.global_batch_size for count, batch in self._until(step))

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in all updates before number `step`."""
        return sum(count * batch.tokens_per_step for count, batch in self._until(step))

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps from the start with at least `tokens` tokens."""
        last = self.phases[-1]
        for phase, following in zip(self.phases, self.phases[1:], strict=False):
            if self.tokens_before(following.first_step) >= tokens:
                last = phase
                break
        missing = max(0, tokens - self.tokens_before(last.first_step))
        return last.first_step + -(-missing // last.batch.tokens_per_step)

    def _until(self, step: int) -> list[tuple[int, Batch]]:
        """Return for each phase the number of its updates before number `step`, with its batch."""
        ends = [phase.first_step for phase in self.phases[1:]] + [step]
        return [
            (max(0, min(end, step) - phase.first_step), phase.batch)
            for phase, end in zip(self.phases, ends, strict=True)
        ]


PLAN_SCHEMA = 1
"""Version of `plan.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Sizes of the process mesh; `world_size` is the product of all but expert.

    Rank order is tensor fastest, then sequence, context, data, and pipeline slowest, so that a
    tensor-parallel group stays inside a node. The expert axis is a part of the data axis; its ranks
    are adjacent there.
    """

    data: int
    tensor: int
    pipeline: int
    sequence: int
    expert: int = 1
    context: int = 1

    @property
    def sequence_parts(self) -> int:
        """Number of ranks that share a sequence: those of the sequence and context axes."""
        return self.sequence * self.context

    @property
    def replicas(self) -> int:
        """Ranks that hold the same parameters, over which ZeRO partitions."""
        return self.data * self.sequence_parts

    @property
    def expert_ranks(self) -> int:
        """Ranks that share out the experts of a layer: the expert axis with its tensor ranks."""
        return self.expert * self.tensor if self.expert > 1 else 1

    @property
    def expert_replicas(self) -> int:
        """Ranks of a pipeline stage that hold the same experts."""
        return self.replicas // self.expert

    @property
    def world_size(self) -> int:
        return self.replicas * self.tensor * self.pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """Part of a plan that determines device memory and step time."""

    config: RunConfig
    """Configuration as composed, with the kernels that it leaves open. Other derived values are
    not written back into it.
    """
    hardware: Hardware
    """Machines and devices, declared or detected."""
    mesh: Mesh
    batch: Batch
    """Batch of each step; with a ramp, of the steps after it."""
    stage_blocks: tuple[int, ...] = ()
    """Number of blocks of each pipeline stage."""

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that ZeRO partitions over; with HSDP, those of one shard group."""
        return self.config.zero_stage.shard_group_size or self.mesh.replicas

    @property
    def stages(self) -> tuple[range, ...]:
        """Indices of the blocks of each pipeline stage."""
        ends = tuple(accumulate(self.stage_blocks))
        return tuple(
            range(end - size, end) for end, size in zip(ends, self.stage_blocks, strict=True)
        )

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a pipeline rank, in the order of the forward pass: `rank`, and if
        the pipeline is folded the one as far from the end.
        """
        axes = self.config.parallelism
        return (rank, axes.stages - 1 - rank) if axes.is_folded else (rank,)


def peak_rate(optimizer: OptimizerConfig, factor: float, key: str = "lr") -> float:
    """Return a learning rate at the peak of the schedule, times a factor.

    Where the key is None, such as Muon's `matrix_lr`, `lr` applies.
    """
    own: float | None = getattr(optimizer, key)
    return (optimizer.lr if own is None else own) * factor


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan(LayoutPlan):
    """Everything that a launch will do; written to `plan.json` and only read afterwards."""

    total_steps: int
    """Optimizer steps of the whole run."""
    stop_step: int
    """Step at which this launch ends; `total_steps` unless `training.stop_after_steps` is set."""
    warmup_steps: int
    """Optimizer steps of the linear warmup."""
    deepspeed: dict[str, Any] = field(default_factory=dict)
    """Complete DeepSpeed JSON without "auto"; empty for another engine."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of an engine other than DeepSpeed, nested."""
    ramp: tuple[BatchPhase, ...] = ()
    """Batch phases of the run, the last of them with `batch`; empty if the batch is constant."""
    derived: tuple[DerivedValue, ...] = ()
    """Every derived value with its reason."""
    not_yet: tuple[str, ...] = ()
    """Planned techniques that cannot be trained with yet, in words; `launch` refuses such a
    plan.
    """
    lr_scale: float = 1.0
    """Factor of the learning rates by `optimizer.lr_scaling`."""
    engine: str = "deepspeed"
    """Engine that runs the steps: an option of the group `engine`."""
    schema: int = field(default=PLAN_SCHEMA)

    @property
    def peak_lr(self) -> float:
        """Base learning rate at the peak of the schedule."""
        return peak_rate(self.config.optimizer, self.lr_scale)

    @property
    def batches(self) -> Batches:
        """Batch of every step."""
        return Batches.of(self.ramp, self.batch)
