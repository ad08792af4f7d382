"""Placement of stages, shards and data on ranks: a plan's mesh, rank by rank."""

from __future__ import annotations

from typing import Any

from trainctl.errors import TrainctlError
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, read_command
from trainctl.runs.layout import AttemptPaths

MOST_RANKS = 1024
"""Most ranks that are listed; beyond that, only their number is shown."""

AXES = ("data", "tensor", "sequence", "pipeline", "expert")

SHARDED_FROM = {"optimizer states": 1, "gradients": 2, "parameters": 3}
"""Tensors that data ranks shard, with the lowest ZeRO stage that does (arXiv:1910.02054, 5)."""


def placement(plan: RunPlan, attempt: AttemptPaths) -> dict[str, Any]:
    """Return the mesh, the hosts, and the coordinates of each rank.

    A rank's coordinates are `[node, data, tensor, sequence, stage]`. Tensor is the fastest axis,
    then sequence, data and stage, as in `trainctl.plan.types.Mesh`.

    Args:
        attempt: Attempt whose `command.json`, if it exists, names the hosts.
    """
    mesh, batch = plan.mesh, plan.batch
    world = mesh.world_size
    per_node = max(1, world // plan.hardware.nodes)
    stage = plan.config.zero_stage.stage
    shards = mesh.data * mesh.sequence
    ranks = []
    for rank in range(min(world, MOST_RANKS)):
        rest, tensor = divmod(rank, mesh.tensor)
        rest, sequence = divmod(rest, mesh.sequence)
        pipeline, data = divmod(rest, mesh.data)
        ranks.append([rank // per_node, data, tensor, sequence, pipeline])
    return {
        "world_size": world,
        "mesh": {axis: getattr(mesh, axis) for axis in AXES},
        "nodes": plan.hardware.nodes,
        "ranks_per_node": per_node,
        "hosts": _hosts(attempt),
        "hardware": plan.hardware.name,
        "accelerator": plan.hardware.accelerator.value,
        "engine": plan.engine,
        "zero_stage": stage,
        "shards": {name: shards if stage >= least else 1 for name, least in SHARDED_FROM.items()},
        "blocks": [[part.start, part.stop] for part in plan.stages] or None,
        "batch": {
            "global": batch.global_batch_size,
            "micro": batch.micro_batch_size,
            "accumulation": batch.gradient_accumulation_steps,
            "sequence_length": batch.sequence_length,
        },
        "ranks": ranks,
        "ranks_left_out": world - len(ranks),
    }


def _hosts(attempt: AttemptPaths) -> list[str]:
    try:
        command: AttemptCommand = read_command(attempt)
    except (OSError, ValueError, TypeError, TrainctlError):
        return []
    return [node.host for node in command.nodes]
