"""Memory budget of a plan: device, host, NVMe and disk. Closed form, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from trainctl.config.registry import function_of
from trainctl.config.schema import Accelerator, AttentionKind
from trainctl.memory import constants
from trainctl.memory.activations import (
    block_activations,
    compute_bytes,
    scale_traced_block,
    tokens_per_rank,
)
from trainctl.memory.constants import Fragmentation, Range
from trainctl.memory.engine import EngineMemory, read_engine
from trainctl.memory.host import (
    HostBudget,
    checkpoint_bytes,
    checkpoints_kept_bytes,
    host_budget,
    nvme_bytes,
    weights_only_bytes,
    weights_only_kept_bytes,
)
from trainctl.memory.partial import trained_stages
from trainctl.memory.rank import Components, fullest_phase
from trainctl.memory.stages import Stage, folded_stages, pipeline_stages, stages_from_anatomy
from trainctl.memory.traced import TracedModel, block_on_tensor_rank, store_notes, teacher_phase
from trainctl.options.precision import precision_of
from trainctl.plans.mixture import largest_batches
from trainctl.plans.shapes import repeated_heads
from trainctl.plans.types import Batch, LayoutPlan, RunPlan

BUDGET_SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """Memory budget of one rank of a pipeline stage."""

    pipeline_stage: int
    """Index of the stage, from 0."""
    moments: Mapping[str, Components]
    """Device memory in each phase of a step, by the name of the phase."""

    @property
    def peak_phase(self) -> str:
        """Name of the phase with the peak."""
        return fullest_phase(self.moments)

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in each phase, by the name of the phase."""
        return {name: moment.total for name, moment in self.moments.items()}

    @property
    def components(self) -> Components:
        """Components of the peak."""
        return self.moments[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Device memory that a plan needs, in bytes, on the fullest pipeline stage."""

    fits: bool | None
    """Whether the plan fits on the device; None if the capacity is unknown or lies between the low
    and high estimates.
    """
    device_capacity_bytes: int
    """Memory of a device; 0 when unknown."""
    device_peak_bytes: int
    """Peak of all device memory: tensors, driver context, communication library."""
    device_peak_low_bytes: int
    """Lower bound of the peak."""
    device_peak_high_bytes: int
    """Upper bound of the peak, allocator fragmentation included."""
    device_reserved_bytes: int
    """Bytes reserved by torch's allocator at the peak, driver context excluded."""
    stages: tuple[StageBudget, ...]

    @property
    def worst_stage(self) -> StageBudget:
        """Fullest pipeline stage."""
        return max(self.stages, key=lambda stage: stage.peak_bytes)

    @property
    def peak_phase(self) -> str:
        """Name of the phase with the peak."""
        return self.worst_stage.peak_phase

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in each phase on the fullest stage."""
        return self.worst_stage.phases

    @property
    def components(self) -> Components:
        """Components of the peak."""
        return self.worst_stage.components


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget(DeviceBudget):
    """Memory budget of a plan, in bytes: devices, host, NVMe and disk."""

    host: HostBudget
    """Host memory of one machine."""
    nvme_bytes_per_node: int
    """NVMe swap files of one machine."""
    checkpoint_bytes: int
    """Size of one checkpoint on disk."""
    checkpoints_kept_bytes: int
    """Size of all checkpoints on disk at once."""
    weights_only_bytes: int
    """Size of one weights-only checkpoint; 0 if none is saved."""
    weights_only_kept_bytes: int
    """Size of all weights-only checkpoints on disk at once."""
    notes: tuple[str, ...]
    """Caveats on these figures, printed with them."""

    def to_json(self) -> dict[str, Any]:
        """Return the machine-readable form of `trainctl estimate-memory --json`."""
        return {
            "schema": BUDGET_SCHEMA,
            "fits": self.fits,
            "device_capacity_bytes": self.device_capacity_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "device_peak_low_bytes": self.device_peak_low_bytes,
            "device_peak_high_bytes": self.device_peak_high_bytes,
            "device_reserved_bytes": self.device_reserved_bytes,
            "peak_phase": self.peak_phase,
            "phases": self.phases,
            "components": self.components.to_json(),
            "stages": [
                {
                    "pipeline_stage": stage.pipeline_stage,
                    "peak_bytes": stage.peak_bytes,
                    "components": stage.components.to_json(),
                }
                for stage in self.stages
            ],
            "host": {
                "bytes_per_node": self.host.bytes_per_node,
                "components": dict(self.host.components),
            },
            "nvme_bytes_per_node": self.nvme_bytes_per_node,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoints_kept_bytes": self.checkpoints_kept_bytes,
            "weights_only_bytes": self.weights_only_bytes,
            "weights_only_kept_bytes": self.weights_only_kept_bytes,
            "notes": list(self.notes),
        }


def budget(plan: RunPlan, traced: TracedModel | None = None) -> MemoryBudget:
    """Return the memory budget of a plan; with several sequence lengths, of the fullest one.

    `traced` is the trace of the model; None uses the closed form of its shape.
    """
    return max(
        (
            _compute_budget(replace(plan, batch=batch), _trace_for_batch(plan, batch, traced))
            for batch in largest_batches(plan)
        ),
        key=lambda found: found.device_peak_bytes,
    )


def _trace_for_batch(
    sketch: LayoutPlan, batch: Batch, traced: TracedModel | None
) -> TracedModel | None:
    """Return the trace to use for `batch`, whose sequences may be longer than the traced ones.

    Longer sequences use the closed form if the model has one (None). Otherwise each token keeps
    the same bytes, except for the scores of eager attention, which grow with the length.
    """
    longer = batch.sequence_length / sketch.batch.sequence_length
    if traced is None or longer <= 1:
        return traced
    model = sketch.config.model
    if model.has_closed_form:
        return None
    if model.attention is not AttentionKind.eager:
        return traced
    attention = round(longer * traced.block.attention)
    return replace(traced, block=replace(traced.block, attention=attention))


def _compute_budget(plan: RunPlan, traced: TracedModel | None) -> MemoryBudget:
    engine = read_engine(plan)
    held = _trained_stages(plan, engine, traced)
    device = _device_budget(plan, engine, held)
    one, alone = checkpoint_bytes(plan, engine), weights_only_bytes(plan, engine)
    # The machine that holds the largest stage may hold only ranks of it.
    host = max(
        (host_budget(plan, engine, stage, device.device_peak_bytes) for stage in held),
        key=lambda item: item.bytes_per_node,
    )
    return MemoryBudget(
        **{item.name: getattr(device, item.name) for item in fields(device)},
        host=host,
        nvme_bytes_per_node=max(nvme_bytes(plan, engine, stage) for stage in held),
        checkpoint_bytes=one,
        checkpoints_kept_bytes=checkpoints_kept_bytes(plan, one),
        weights_only_bytes=alone,
        weights_only_kept_bytes=weights_only_kept_bytes(plan, alone),
        notes=tuple(_budget_notes(plan, traced)),
    )


def device_budget(sketch: LayoutPlan, traced: TracedModel | None = None) -> DeviceBudget:
    """Return the device part of `budget`, which needs no complete plan."""
    found = []
    for batch in largest_batches(sketch):
        each = replace(sketch, batch=batch)
        engine = read_engine(each)
        held = _trained_stages(each, engine, _trace_for_batch(sketch, batch, traced))
        found.append(_device_budget(each, engine, held))
    return max(found, key=lambda budget: budget.device_peak_bytes)


def _device_budget(
    sketch: LayoutPlan, engine: EngineMemory, held: tuple[Stage, ...]
) -> DeviceBudget:
    runtime, fragmentation = runtime_range(sketch), expected_fragmentation(sketch)
    phases = function_of("engine", sketch.config.engine.kind, "phases")
    teacher = teacher_phase(sketch, runtime.usual)
    budgets = [
        StageBudget(
            pipeline_stage=stage.index,
            moments={**teacher, **phases(sketch, engine, stage, runtime.usual)},
        )
        for stage in held
    ]
    worst_stage = max(budgets, key=lambda item: item.peak_bytes)
    low, high = peak_bounds(worst_stage.components, runtime, fragmentation)
    capacity = sketch.hardware.device_memory_bytes
    return DeviceBudget(
        fits=fits(capacity, low, high),
        device_capacity_bytes=capacity or 0,
        device_peak_bytes=worst_stage.peak_bytes,
        device_peak_low_bytes=low,
        device_peak_high_bytes=high,
        device_reserved_bytes=reserved_bytes(
            worst_stage.components.allocated + workspace_bytes(sketch),
            fragmentation,
            runtime,
            None if sketch.hardware.accelerator is Accelerator.cpu else capacity,
        ),
        stages=tuple(budgets),
    )


def _trained_stages(
    plan: LayoutPlan, engine: EngineMemory, traced: TracedModel | None
) -> tuple[Stage, ...]:
    """Return the pipeline stages as the run trains them; traced models are counted by anatomy."""
    model, tensor, expert = plan.config.model, plan.mesh.tensor, plan.mesh.expert
    if traced is not None and (tensor == 1 or not model.has_closed_form):
        held = stages_from_anatomy(
            traced.anatomy,
            tensor=tensor,
            expert=expert,
            stage_blocks=plan.stage_blocks,
            # A module of the user's has been traced as a tensor rank runs it.
            traced=traced.block
            if tensor == 1 or model.is_module
            else block_on_tensor_rank(traced, tensor),
        )
    else:
        held = pipeline_stages(model, tensor=tensor, expert=expert, stage_blocks=plan.stage_blocks)
    held = trained_stages(
        plan.config, held, tensor=tensor, expert=expert, keeps_inputs=engine.keeps_inputs
    )
    fold = folded_stages if plan.config.parallelism.is_folded else tuple
    if traced is None or tensor == 1 or not model.has_closed_form:
        return fold(held)
    closed = partial(
        block_activations,
        model,
        sequence_length=plan.batch.sequence_length,
        element=compute_bytes(plan),
        autocast=engine.autocast,
        liger=bool(plan.config.kernels.liger),
    )
    block = scale_traced_block(traced.block, whole=closed(), part=closed(tensor=tensor))
    return fold(tuple(replace(stage, traced=block) for stage in held))


def _budget_notes(plan: RunPlan, traced: TracedModel | None) -> list[str]:
    config, notes = plan.config, []
    if plan.hardware.device_memory_bytes is None:
        notes.append("The device's memory is not known, so whether this fits is not decided.")
    if plan.hardware.runtime_bytes is not None:
        notes.append(f"Calibrated on this machine on {plan.hardware.calibrated_on}.")
    if plan.hardware.accelerator is Accelerator.cpu:
        notes.append(
            "On cpu a device is a process: the host's figure contains the devices' memory."
        )
    compute = precision_of(config.precision)
    if compute.product_bytes is not None:
        as_ = compute.format.value
        notes.append(
            f"{compute.name} is counted as {as_}: its savings are in compute, not in states."
        )
    if config.kernels.is_compiled:
        notes.append("Compiled blocks are counted as transformers' own code: they keep less.")
    if plan.mesh.expert > 1:
        notes.append(
            "Ranks of the expert axis are counted as equally busy: one that gets twice the mean "
            "of tokens keeps twice as much of its experts' activations."
        )
    if config.checkpoint.mirror is not None:
        notes.append(
            f"Up to {config.checkpoint.keep} of the checkpoints on disk wait for checkpoint.mirror "
            "while it cannot be reached."
        )
    return [*notes, *store_notes(plan)]


def runtime_range(plan: LayoutPlan) -> Range:
    """Return a rank's memory outside tensors: measured on this machine, otherwise usual values."""
    measured = plan.hardware.runtime_bytes
    if measured is not None:
        doubt = int(constants.CALIBRATION_UNCERTAINTY * measured)
        return Range(low=measured - doubt, usual=measured, high=measured + doubt)
    accelerator = plan.hardware.accelerator
    parts = [constants.CONTEXT[accelerator]]
    if accelerator is not Accelerator.cpu:
        parts.append(constants.LIBRARY_WORKSPACE)
        parts += [constants.COMMUNICATOR] * count_communicators(plan)
    return Range(
        low=sum(part.low for part in parts),
        usual=sum(part.usual for part in parts),
        high=sum(part.high for part in parts),
    )


def count_communicators(plan: LayoutPlan) -> int:
    """Return the number of process groups on a device: the world, each mesh axis smaller than the
    world, HSDP's shards and copies, tensor ranks with the same key-value head, and with a pipeline
    its neighbours and the holders of tied weights.
    """
    mesh = plan.mesh
    if mesh.world_size == 1:
        return 0
    axes = [mesh.data, mesh.tensor, mesh.sequence, mesh.context]
    axes.append(repeated_heads(plan.config.model, mesh.tensor))
    if plan.config.zero_stage.shard_group_size is not None:
        axes += [plan.shard_ranks, mesh.data // plan.shard_ranks]
    within = sum(1 < size < mesh.world_size for size in axes)
    return 1 + within + (2 if mesh.pipeline > 1 else 0)


def expected_fragmentation(plan: LayoutPlan) -> Fragmentation:
    """Return the allocator's fragmentation as a fraction of the allocated memory: measured on this
    machine, otherwise by the size of the largest common tensor.
    """
    measured = plan.hardware.fragmentation
    hidden = tokens_per_rank(plan) * plan.config.model.hidden_size * compute_bytes(plan)
    large = hidden >= constants.LARGE_TENSOR_BYTES
    if large or plan.hardware.accelerator is Accelerator.cpu:
        usual = constants.FRAGMENTATION_LARGE
    else:
        usual = constants.FRAGMENTATION
    if measured is None:
        return usual
    return replace(usual, usual=measured, high=max(measured, usual.high))


def reserved_bytes(
    tensors: int, fragmentation: Fragmentation, runtime: Range, capacity: int | None
) -> int:
    """Return the bytes that torch's allocator reserves when tensors take `tensors` at their peak.

    Fragmentation alone is no out-of-memory error: when the device refuses a block, the allocator
    releases unused blocks and tries again (`release_cached_blocks`, CUDACachingAllocator.cpp). So
    it reserves no more than fits on the device, unless the tensors themselves need more.
    """
    held = int(tensors * (1 + fragmentation.usual))
    if capacity is None:
        return held
    outside = runtime.usual - constants.LIBRARY_WORKSPACE.usual
    return max(tensors, min(held, capacity - outside))


def workspace_bytes(plan: LayoutPlan) -> int:
    """Return the bytes of library workspaces that torch's allocator counts as allocated."""
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    return 0 if on_cpu else constants.LIBRARY_WORKSPACE.usual


def peak_bounds(peak: Components, runtime: Range, fragmentation: Fragmentation) -> tuple[int, int]:
    """Return the lower and upper bound of a peak, in bytes.

    States are known almost exactly, activations less so; the allocator adds fragmentation.
    """
    exact = peak.allocated - peak.estimated
    doubt = constants.STATE_UNCERTAINTY * exact + constants.ACTIVATION_UNCERTAINTY * peak.estimated
    low = (peak.allocated - doubt) * (1 + fragmentation.low)
    high = (peak.allocated + doubt) * (1 + fragmentation.high)
    return int(low) + runtime.low, int(high) + runtime.high


def fits(capacity: int | None, low: int, high: int) -> bool | None:
    if capacity is None:
        return None
    if high <= capacity:
        return True
    return False if low > capacity else None
