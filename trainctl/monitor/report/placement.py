"""Which rank has which stage, shard and data: a plan's mesh, rank by rank."""

from __future__ import annotations

from typing import Any

from trainctl.errors import TrainctlError
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, read_command
from trainctl.runs.layout import AttemptPaths

MOST_RANKS = 1024
"""That are listed; more would only be looked at as a number."""

AXES = ("data", "tensor", "sequence", "pipeline", "expert")

SHARDED_FROM = {"optimizer states": 1, "gradients": 2, "parameters": 3}
"""What is shared out among the data ranks, and from which ZeRO stage on (arXiv:1910.02054, 5)."""


def placement(plan: RunPlan, attempt: AttemptPaths) -> dict[str, Any]:
    """Return the mesh, the hosts, and for each rank its place: `[node, data, tensor, sequence,
    stage]`.

    Tensor is the fastest axis, then sequence, data and stage, as `trainctl.plan.types.Mesh` has it.

    Args:
        attempt: Whose `command.json` names the hosts, if it is there.
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
