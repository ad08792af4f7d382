"""Peak memory of the ranks, beside the planned one."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trainctl.config.schema import Accelerator
from trainctl.engines.process import Process
from trainctl.engines.stopwatch import PhaseMemory, peak_resident_bytes
from trainctl.memory.budget import MemoryBudget, budget
from trainctl.memory.traced import known_traced_model
from trainctl.options.callbacks import Callback, Context
from trainctl.plan.types import RunPlan
from trainctl.train.callbacks.context import Journal
from trainctl.train.session import Session

STEADY_AFTER_STEPS = 2
"""Steps until memory is compared: the first allocates what stays, the second has all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Peak memory of a process since it started, in bytes."""

    device_peak_bytes: int
    """Device memory in use: tensors, driver context, communication library. The plan's budget
    predicts it under the same name. On a CPU, the resident memory of the process.
    """
    allocated_peak_bytes: int | None
    """Device memory in tensors; None on a CPU."""
    reserved_peak_bytes: int | None
    """Device memory held by torch's caching allocator; None on a CPU."""
    host_peak_bytes: int
    """Resident memory of the process."""


def peak_memory(device: torch.device) -> PeakMemory:
    """Return the peak memory of this process so far.

    Memory outside the allocator is what the driver counts as used beyond it, so another process on
    the same device is counted too.
    """
    host = peak_resident_bytes()
    if device.type == "cpu":
        return PeakMemory(
            device_peak_bytes=host,
            allocated_peak_bytes=None,
            reserved_peak_bytes=None,
            host_peak_bytes=host,
        )
    allocated = torch.cuda.max_memory_allocated(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = max(0, total - free - torch.cuda.memory_reserved(device))
    return PeakMemory(
        device_peak_bytes=allocated + outside,
        allocated_peak_bytes=allocated,
        reserved_peak_bytes=torch.cuda.max_memory_reserved(device),
        host_peak_bytes=host,
    )


def peak_bytes(device: torch.device, phases: PhaseMemory | None = None) -> dict[str, int | None]:
    """Return the peaks of this process that cost next to nothing to read, for every step's record.

    `allocated` is the memory of tensors on the device (None on a CPU), `host` the resident memory.
    Peaks are since the start. With `phases`, the memory that it measures (of tensors, or on a CPU
    of the process) has its peak since the last record.
    """
    if device.type == "cpu":
        return {"allocated": None, "host": phases.take() if phases else peak_resident_bytes()}
    allocated = phases.take() if phases else torch.cuda.max_memory_allocated(device)
    return {"allocated": allocated, "host": peak_resident_bytes()}


def memory_record(
    plan: RunPlan, process: Process, phases: PhaseMemory | None = None
) -> dict[str, Any]:
    """Return the fullest rank's peaks beside the planned ones, if known; on all ranks together.

    Args:
        phases: Peaks of each part of a step, if measured; the planned ones are then added.
    """
    peaks = _overall_peak(peak_memory(process.device), phases)
    ranks = [asdict(peak) for peak in process.gather(peaks)]
    measured = {
        name: None if first is None else max(peak[name] for peak in ranks)
        for name, first in ranks[0].items()
    }
    planned = _planned_budget(plan)
    beside = host_bytes_in_device_peak(plan, planned) if planned else 0
    record: dict[str, Any] = {
        "measured": measured,
        "planned": planned
        and {
            "device_peak_bytes": planned.device_peak_bytes + beside,
            "device_peak_low_bytes": planned.device_peak_low_bytes + beside,
            "device_peak_high_bytes": planned.device_peak_high_bytes + beside,
            "allocated_peak_bytes": planned.components.allocated,
            "reserved_peak_bytes": planned.device_reserved_bytes,
        },
    }
    if phases is not None:
        every = process.gather(phases.peaks)
        record["phases"] = {
            "measured": {name: max(peaks[name] for peaks in every) for name in phases.peaks},
            "planned": {
                name: {"device_bytes": moment.total, "allocated_bytes": moment.allocated}
                for name, moment in (planned.worst_stage.moments.items() if planned else ())
            },
        }
    return record


def _planned_budget(plan: RunPlan) -> MemoryBudget | None:
    """Return the memory budget of a plan.

    None for a model without a closed form whose trace is not in this user's cache: a rank does not
    trace.
    """
    traced = known_traced_model(plan.config)
    return None if traced is None and plan.config.model.needs_trace else budget(plan, traced)


def host_bytes_in_device_peak(plan: RunPlan, planned: MemoryBudget) -> int:
    """Return a rank's bytes that the budget counts as host memory but its device peak contains.

    On a CPU these are the offloaded tensors and NVMe buffers, resident in the same process. On a
    GPU they are 0: the GPU's own memory is measured.
    """
    if plan.hardware.accelerator is not Accelerator.cpu:
        return 0
    host = planned.host
    return (host.bytes_per_node - host.components["processes"]) // plan.hardware.devices_per_node


def _overall_peak(peak: PeakMemory, phases: PhaseMemory | None) -> PeakMemory:
    """Return the peak since the start; `phases` restarts the measured peak at each part."""
    if phases is None:
        return peak
    highest = phases.highest
    if peak.allocated_peak_bytes is None:
        resident = max(peak.host_peak_bytes, highest)
        return replace(peak, device_peak_bytes=resident, host_peak_bytes=resident)
    outside = peak.device_peak_bytes - peak.allocated_peak_bytes
    allocated = max(peak.allocated_peak_bytes, highest)
    return replace(peak, allocated_peak_bytes=allocated, device_peak_bytes=allocated + outside)


class MemoryRecords(Callback):
    """Records the fullest rank's peak memory after the first steps and at the end."""

    def __init__(self, session: Session, journal: Journal) -> None:
        self._session, self._journal = session, journal
        self._steady = session.progress.step + STEADY_AFTER_STEPS

    def after_step(self, context: Context) -> None:
        if context.step == self._steady:
            self._record(context.step, at_end=False)

    def on_train_end(self, context: Context) -> None:
        self._record(context.step, at_end=True)

    def _record(self, step: int, *, at_end: bool) -> None:
        session = self._session
        record = memory_record(session.plan, session.process, session.engine.times.memory)
        self._journal.record("memory", step=step, at_end=at_end, **record)
