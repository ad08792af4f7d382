"""Memory of a device, planned and measured, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.memory.budget import MemoryBudget, budget
from trainctl.memory.traced import traced_already
from trainctl.plan.types import RunPlan
from trainctl.runs.records import Event

MEASURED_AS = {
    "load": "load",
    "forward_end": "forward",
    "backward_start": "backward",
    "backward_end": "backward",
    "step": "optimizer",
}
"""Part of a step in which each phase of a budget is measured."""


def memory_beside(plan: RunPlan | None, record: Event | None) -> dict[str, Any] | None:
    """Return planned and measured memory, in bytes: peaks, bounds, and parts of each phase.

    Args:
        plan: The run's plan; None if it cannot be read.
        record: The run's last `memory` record; None before the first.

    Returns:
        None if neither is known.
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
        # The ranks' prediction, from a machine that had the model's trace.
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
    """Return the memory budget; None if it needs a trace that is not in this user's cache."""
    try:
        traced = traced_already(plan.config)
        return None if traced is None and plan.config.model.needs_trace else budget(plan, traced)
    except (TrainctlError, OSError, ValueError, ArithmeticError, LookupError):
        return None  # another version's plan, or its model is gone
