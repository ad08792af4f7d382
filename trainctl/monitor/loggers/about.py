"""Facts that accompany a run's metrics: its configuration, plan, prediction and origin."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.errors import TrainctlError
from trainctl.memory.budget import budget
from trainctl.plan.types import RunPlan
from trainctl.runs.attempts import config_of, standing_attempt
from trainctl.runs.directory import read_plan, read_record
from trainctl.runs.layout import RunPaths

_OF_THE_RECORD = ("id", "name", "created", "argv", "git")
_PACKAGES = ("trainctl", "torch", "deepspeed", "transformers")


def about(run: RunPaths) -> dict[str, Any]:
    """Return the facts as plain JSON, with references in place of secrets.

    Raises:
        TrainctlError: Files of the run are damaged (exit code 5).
    """
    record = read_record(run)
    origin = {name: record.get(name) for name in _OF_THE_RECORD}
    versions = record.get("packages") or {}
    origin["packages"] = {name: versions[name] for name in _PACKAGES if name in versions}
    known: dict[str, Any] = {"run": origin}
    known["config"] = to_plain(config_of(run))
    number = standing_attempt(run).number
    if number == 0:
        return known
    plan = read_plan(run.attempt(number).plan)
    known["plan"] = {
        "attempt": number,
        "total_steps": plan.total_steps,
        "stop_step": plan.stop_step,
        "warmup_steps": plan.warmup_steps,
        "devices": plan.mesh.world_size,
        "nodes": plan.hardware.nodes,
        "accelerator": plan.hardware.accelerator.value,
        "mesh": asdict(plan.mesh),
        "batch": asdict(plan.batch),
    }
    return {**known, "memory": _memory(plan)}


def _memory(plan: RunPlan) -> dict[str, int]:
    """Return the predicted peak of the fullest device; empty if that needs a trace of the model."""
    try:
        if plan.config.model.needs_trace:
            return {}
        found = budget(plan)
    except TrainctlError:
        return {}
    return {
        "device_peak_bytes": found.device_peak_bytes,
        "device_peak_low_bytes": found.device_peak_low_bytes,
        "device_peak_high_bytes": found.device_peak_high_bytes,
    }
