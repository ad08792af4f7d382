"""Memory of a device as it was planned, beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.config.tracing import needs_trace
from trainctl.errors import TrainctlError
from trainctl.memory.budget import MemoryBudget, budget
from trainctl.plan.types import RunPlan
from trainctl.runs.records import Event
from trainctl.search.traces import traced_already

MEASURED_AS = {
    "load": "load",
    "forward_end": "forward",
    "backward_start": "backward",
    "backward_end": "backward",
    "step": "optimizer",
}
"""Phases of a budget, and the part of a step in which each is measured."""


def memory_beside(plan: RunPlan | None, record: Event | None) -> dict[str, Any] | None:
    """Return the plan's peak with its bounds and what each phase holds, and the measured peaks;
    bytes.

    Args:
        plan: Of the run; None where it cannot be read.
        record: Its last `memory` record; None before the first.

    Returns:
        None where neither is known.
    """
    found: dict[str, Any] = {}
    phases = (record or {}).get("phases")
    measured = phases.get("measured", {}) if isinstance(phases, Mapping) else {}
    planned = _budget(plan) if plan is not None else None
    if planned is not None:
        found = {
            "planned_bytes": planned.device_peak_bytes,
            "planned_low_bytes": planned.device_peak_low_bytes,
            "planned_high_bytes": planned.device_peak_high_bytes,
            "capacity_bytes": planned.device_capacity_bytes or None,
            "peak_phase": planned.peak_phase,
            "phases": [
                {
                    "name": name,
                    "planned_bytes": moment.total,
                    "allocated_bytes": moment.allocated,
                    "measured_bytes": measured.get(MEASURED_AS.get(name, name)),
                    "components": {k: v for k, v in moment.to_json().items() if v},
                }
                for name, moment in planned.worst_stage.moments.items()
            ],
        }
    elif record is not None and isinstance(record.get("planned"), Mapping):
        # What the ranks counted with, on a machine that had the trace of the model.
        said = record["planned"]
        found = {
            "planned_bytes": said.get("device_peak_bytes"),
            "planned_low_bytes": said.get("device_peak_low_bytes"),
            "planned_high_bytes": said.get("device_peak_high_bytes"),
        }
    if record is not None:
        found |= {"measured": dict(record["measured"]), "measured_at_step": record.get("step")}
    return found or None


def _budget(plan: RunPlan) -> MemoryBudget | None:
    """Of a model that needs a trace, only where it is in this user's cache."""
    try:
        traced = traced_already(plan.config)
        return None if traced is None and needs_trace(plan.config) else budget(plan, traced)
    except (TrainctlError, OSError, ValueError, ArithmeticError, LookupError):
        return None  # of another version, or its model is not here any more
