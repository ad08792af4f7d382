"""Panels of a report beside its curves: use of time, cost, memory, and placement of ranks."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from trainctl.config.reading import open_file
from trainctl.errors import TrainctlError
from trainctl.memory.budget import MemoryBudget, budget
from trainctl.memory.traced import known_traced_model
from trainctl.monitor.report.columns import GrowingColumns, finite_or_none
from trainctl.monitor.report.history import AttemptTimes, History
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand, read_command
from trainctl.runs.directory import last_attempt
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.records import Event

RECENT_STEPS = 200
"""Number of last steps whose mean time predicts the rest."""

MOST_PROFILES, PROFILE_BYTES = 8, 16_384
"""Most profiles that are shown, those of the lowest ranks, and the bytes of each: a summary that a
run wrote has about 4,000.
"""


def time_and_cost_of(
    history: History, *, stop_step: int | None, now: float | None, price: float | None
) -> dict[str, Any]:
    """Return seconds by use, and device hours and price, so far and to come.

    Args:
        stop_step: Last step of the newest attempt; None if no plan tells.
        now: Current time in Unix seconds, for a live run; None ends the run at its last record.
        price: Price of one device for an hour, in any currency; None leaves prices out.
    """
    attempts = [history.attempts[number] for number in sorted(history.attempts)]
    steps = history.steps
    kept = _training_seconds(steps)
    repeated = sum(_training_seconds(branch.steps) for branch in history.branches)
    ends = [attempt.last for attempt in attempts]
    if now is not None and ends:
        ends[-1] = max(ends[-1], now)
    wall = ends[-1] - attempts[0].launched if attempts else 0.0
    starting = sum(_startup_seconds(attempt) for attempt in attempts)
    between = sum(
        max(0.0, later.launched - earlier.last) for earlier, later in itertools.pairwise(attempts)
    )
    hours = sum(
        (attempt.ranks or 0) * max(0.0, end - attempt.launched) / 3600
        for attempt, end in zip(attempts, ends, strict=True)
    )
    ranks = attempts[-1].ranks or 0 if attempts else 0
    left = max(0, stop_step - history.last_step) if stop_step is not None else None
    recent = _recent_step_seconds(steps)
    seconds_left = left * recent if left is not None and math.isfinite(recent) else None
    hours_left = None if seconds_left is None else seconds_left * ranks / 3600
    found: dict[str, Any] = {
        "wall_seconds": wall,
        "kept_seconds": kept,
        "repeated_seconds": repeated,
        "starting_seconds": starting,
        "between_attempts_seconds": between,
        "other_seconds": max(0.0, wall - kept - repeated - starting - between),
        "repeated_steps": sum(len(branch.steps) for branch in history.branches),
        "attempts": len(attempts),
        "device_hours": hours,
        "device_hours_to_come": hours_left,
        "steps_to_come": left,
        "seconds_to_come": seconds_left,
        "tokens": finite_or_none(steps.last("tokens")),
        "tokens_to_come": _tokens_left(steps, left),
        "parts": _step_parts(steps),
    }
    if price is not None:
        found["price"] = {
            "of_a_device_hour": price,
            "so_far": hours * price,
            "to_come": None if hours_left is None else hours_left * price,
            "repeated": _repeated_hours(history) * price,
        }
    return found


def _training_seconds(steps: GrowingColumns) -> float:
    return float(np.nansum(steps["seconds/total"])) if "seconds/total" in steps else 0.0


def _repeated_hours(history: History) -> float:
    """Return the device hours of repeated steps: their seconds times their attempt's ranks."""
    ranks = {number: attempt.ranks or 0 for number, attempt in history.attempts.items()}
    return sum(
        float(seconds) * ranks[int(number)] / 3600
        for branch in history.branches
        for number, seconds in zip(
            branch.steps["attempt"], branch.steps["seconds/total"], strict=True
        )
        if math.isfinite(seconds)
    )


def _startup_seconds(attempt: AttemptTimes) -> float:
    """Return the seconds before an attempt's first step; all of its time if it made no step."""
    until = attempt.last if attempt.first_step_began is None else attempt.first_step_began
    return max(0.0, until - attempt.launched)


def _recent_step_seconds(steps: GrowingColumns) -> float:
    totals = steps["seconds/total"][-RECENT_STEPS:]
    totals = totals[np.isfinite(totals)]
    return float(totals.mean()) if len(totals) else math.nan


def _tokens_left(steps: GrowingColumns, left: int | None) -> float | None:
    tokens = steps["tokens"][-RECENT_STEPS:]
    if left is None or len(tokens) < 2:
        return None
    return finite_or_none(left * (tokens[-1] - tokens[0]) / (len(tokens) - 1))


def _step_parts(steps: GrowingColumns) -> dict[str, float]:
    """Return the seconds of the steps that count, by part of a step, with `other` last."""
    names = [name for name in steps.names if name.startswith("seconds/")]
    sums = {name.removeprefix("seconds/"): float(np.nansum(steps[name])) for name in names}
    total = sums.pop("total", None)
    if total is not None:
        sums["other"] = max(0.0, total - sum(sums.values()))
    return sums


MEASURED_AS = {
    "load": "load",
    "forward_end": "forward",
    "backward_start": "backward",
    "backward_end": "backward",
    "step": "optimizer",
}
"""Part of a step in which each phase of a budget is measured."""


def memory_comparison(plan: RunPlan | None, record: Event | None) -> dict[str, Any] | None:
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
        traced = known_traced_model(plan.config)
        return None if traced is None and plan.config.model.needs_trace else budget(plan, traced)
    except (TrainctlError, OSError, ValueError, ArithmeticError, LookupError):
        return None  # another version's plan, or its model is gone


MOST_RANKS = 1024
"""Most ranks that are listed; beyond that, only their number is shown."""

AXES = ("data", "tensor", "sequence", "context", "pipeline", "expert")

SHARDED_FROM = {"optimizer states": 1, "gradients": 2, "parameters": 3}
"""Tensors that data ranks shard, with the lowest ZeRO stage that does (arXiv:1910.02054, 5)."""


def placement(plan: RunPlan, attempt: AttemptPaths) -> dict[str, Any]:
    """Return the mesh, the hosts, and the coordinates of each rank.

    A rank's coordinates are `[node, data, tensor, sequence, context, stage]`. Tensor is the fastest
    axis, then sequence, context, data and stage, as in `trainctl.plans.types.Mesh`.

    Args:
        attempt: Attempt whose `command.json`, if it exists, names the hosts.
    """
    mesh, batch = plan.mesh, plan.batch
    world = mesh.world_size
    per_node = max(1, world // plan.hardware.nodes)
    stage = plan.config.zero_stage.stage
    ranks = []
    for rank in range(min(world, MOST_RANKS)):
        rest, tensor = divmod(rank, mesh.tensor)
        rest, sequence = divmod(rest, mesh.sequence)
        rest, context = divmod(rest, mesh.context)
        pipeline, data = divmod(rest, mesh.data)
        ranks.append([rank // per_node, data, tensor, sequence, context, pipeline])
    return {
        "world_size": world,
        "mesh": {axis: getattr(mesh, axis) for axis in AXES},
        "nodes": plan.hardware.nodes,
        "ranks_per_node": per_node,
        "hosts": _host_names(attempt),
        "hardware": plan.hardware.name,
        "accelerator": plan.hardware.accelerator.value,
        "engine": plan.engine,
        "zero_stage": stage,
        "shards": {
            name: plan.shard_ranks if stage >= least else 1 for name, least in SHARDED_FROM.items()
        },
        "blocks": [
            [[part.start, part.stop] for part in map(plan.stages.__getitem__, plan.stages_of(rank))]
            for rank in range(mesh.pipeline if plan.stages else 0)
        ]
        or None,
        "batch": {
            "global": batch.global_batch_size,
            "micro": batch.micro_batch_size,
            "accumulation": batch.gradient_accumulation_steps,
            "sequence_length": batch.sequence_length,
        },
        "ranks": ranks,
        "ranks_left_out": world - len(ranks),
    }


def _host_names(attempt: AttemptPaths) -> list[str]:
    try:
        command: AttemptCommand = read_command(attempt)
    except (OSError, ValueError, TypeError, TrainctlError):
        return []
    return [node.host for node in command.nodes]


def read_profiles(run: RunPaths) -> list[dict[str, Any]]:
    """Return the summaries that the newest attempt with profiled steps wrote, by rank."""
    for number in range(last_attempt(run), 0, -1):
        folder = run.attempt(number).profile
        names = (
            re.fullmatch(r"rank-([0-9]{1,9})\.txt", path.name) for path in folder.glob("*.txt")
        )
        ranks = sorted(int(name[1]) for name in names if name)
        found = []
        for rank in ranks[:MOST_PROFILES]:
            with suppress(OSError), open_file(folder / f"rank-{rank}.txt") as file:
                raw = file.read(PROFILE_BYTES + 1)
                cut = "…\n" if len(raw) > PROFILE_BYTES else ""
                text = raw[:PROFILE_BYTES].decode(errors="replace") + cut
                text = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
                found.append({"attempt": number, "rank": rank, "text": text})
        if found:
            return found
    return []
