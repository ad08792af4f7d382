"""The memory budget of a plan: device, host, NVMe and disk. Closed form, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    DataType,
    ModelFamily,
)
from trainctl.memory import constants
from trainctl.memory.components import Components, fullest
from trainctl.memory.constants import Range
from trainctl.memory.engine import read_engine
from trainctl.memory.host import (
    HostBudget,
    checkpoint_bytes,
    checkpoints_kept_bytes,
    host_budget,
    nvme_bytes,
)
from trainctl.memory.phases import phases
from trainctl.memory.stages import stages
from trainctl.plan.types import RunPlan

BUDGET_SCHEMA = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBudget:
    """Peak of one rank of a pipeline stage.

    Attributes:
        pipeline_stage: Its index.
        peak_phase: Phase of the peak.
        phases: Phase to bytes.
        components: What the peak is made of.
    """

    pipeline_stage: int
    peak_phase: str
    phases: Mapping[str, int]
    components: Components

    @property
    def peak_bytes(self) -> int:
        return self.components.total


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What a plan needs, in bytes. Device figures are those of the fullest pipeline stage.

    Attributes:
        fits: Whether the device holds it; None when the capacity lies between low and high, or
            is unknown.
        device_capacity_bytes: Memory of a device; 0 when unknown.
        device_peak_bytes: Everything on the device at its fullest: tensors, driver context,
            communication library.
        device_peak_low_bytes: The least that it may be.
        device_peak_high_bytes: The most that it may be, allocator fragmentation included.
        device_reserved_bytes: Held by torch's allocator at that moment, context excluded.
        peak_phase: When that is.
        phases: Peak of each phase.
        components: What the peak is made of.
        stages: Each pipeline stage.
        host: Memory of one machine.
        nvme_bytes_per_node: Swap files of one machine.
        checkpoint_bytes: One checkpoint on disk.
        checkpoints_kept_bytes: All that are there at once.
        notes: What the reader should know about these figures.
    """

    fits: bool | None
    device_capacity_bytes: int
    device_peak_bytes: int
    device_peak_low_bytes: int
    device_peak_high_bytes: int
    device_reserved_bytes: int
    peak_phase: str
    phases: Mapping[str, int]
    components: Components
    stages: tuple[StageBudget, ...]
    host: HostBudget
    nvme_bytes_per_node: int
    checkpoint_bytes: int
    checkpoints_kept_bytes: int
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The machine-readable form of `trainctl estimate-memory --json`."""
        return {
            "schema": BUDGET_SCHEMA,
            "fits": self.fits,
            "device_capacity_bytes": self.device_capacity_bytes,
            "device_peak_bytes": self.device_peak_bytes,
            "device_peak_low_bytes": self.device_peak_low_bytes,
            "device_peak_high_bytes": self.device_peak_high_bytes,
            "device_reserved_bytes": self.device_reserved_bytes,
            "peak_phase": self.peak_phase,
            "phases": dict(self.phases),
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
            "notes": list(self.notes),
        }


def budget(plan: RunPlan) -> MemoryBudget:
    """The memory budget of a plan."""
    engine = read_engine(plan)
    runtime = _runtime(plan)
    held = stages(plan.config.model, tensor=plan.mesh.tensor, stage_blocks=plan.stage_blocks)
    budgets = []
    for stage in held:
        moments = phases(plan, engine, stage, runtime.usual)
        worst = fullest(moments)
        budgets.append(
            StageBudget(
                pipeline_stage=stage.index,
                peak_phase=worst,
                phases={name: moment.total for name, moment in moments.items()},
                components=moments[worst],
            )
        )
    worst_stage = max(budgets, key=lambda item: item.peak_bytes)
    peak = worst_stage.peak_bytes
    low, high = _band(worst_stage.components, runtime)
    capacity = plan.hardware.device_memory_bytes
    one = checkpoint_bytes(plan, engine)
    # The machine that holds the largest stage may hold only ranks of it.
    host = max(
        (host_budget(plan, engine, stage, peak) for stage in held),
        key=lambda item: item.bytes_per_node,
    )
    return MemoryBudget(
        fits=_fits(capacity, low, high),
        device_capacity_bytes=capacity or 0,
        device_peak_bytes=peak,
        device_peak_low_bytes=low,
        device_peak_high_bytes=high,
        device_reserved_bytes=int(worst_stage.components.allocated * (1 + constants.FRAGMENTATION)),
        peak_phase=worst_stage.peak_phase,
        phases=worst_stage.phases,
        components=worst_stage.components,
        stages=tuple(budgets),
        host=host,
        nvme_bytes_per_node=max(nvme_bytes(plan, engine, stage) for stage in held),
        checkpoint_bytes=one,
        checkpoints_kept_bytes=checkpoints_kept_bytes(plan, one),
        notes=tuple(_notes(plan)),
    )


def _runtime(plan: RunPlan) -> Range:
    """Memory of a rank that is in no tensor."""
    accelerator = plan.hardware.accelerator
    parts = [constants.CONTEXT[accelerator]]
    if accelerator is not Accelerator.cpu:
        parts.append(constants.LIBRARY_WORKSPACE)
        if plan.mesh.world_size > 1:
            parts.append(constants.COMMUNICATION_LIBRARY)
    return Range(
        low=sum(part.low for part in parts),
        usual=sum(part.usual for part in parts),
        high=sum(part.high for part in parts),
    )


def _band(peak: Components, runtime: Range) -> tuple[int, int]:
    """The least and most that a peak may be.

    States are known almost exactly, activations less so; the allocator adds fragmentation.
    """
    exact = peak.allocated - peak.estimated
    doubt = constants.STATE_UNCERTAINTY * exact + constants.ACTIVATION_UNCERTAINTY * peak.estimated
    low = (peak.allocated - doubt) * (1 + constants.FRAGMENTATION_LOW)
    high = (peak.allocated + doubt) * (1 + constants.FRAGMENTATION_HIGH)
    return int(low) + runtime.low, int(high) + runtime.high


def _fits(capacity: int | None, low: int, high: int) -> bool | None:
    if capacity is None:
        return None
    if high <= capacity:
        return True
    return False if low > capacity else None


def _notes(plan: RunPlan) -> list[str]:
    config, notes = plan.config, []
    if plan.hardware.device_memory_bytes is None:
        notes.append("The device's memory is not known, so whether this fits is not decided.")
    if plan.hardware.accelerator is Accelerator.cpu:
        notes.append(
            "On cpu a device is a process: the host's figure contains the devices' memory."
        )
    if config.model.family is ModelFamily.hf:
        notes.append("The model directory is counted as a Llama of the same shape.")
    if config.precision.compute is DataType.fp8:
        notes.append("fp8 is counted as bf16: its savings are in compute, not in states.")
    if config.kernels.compile is not CompileKind.none:
        notes.append("Compiled blocks are counted as transformers' own code: they keep less.")
    if config.zero_stage.quantized_weights or config.zero_stage.quantized_gradients:
        notes.append("Buffers of quantized communication (ZeRO++) are not counted.")
    if plan.mesh.expert > 1:
        notes.append("Expert parallelism is not counted: no model here has experts yet.")
    return notes
