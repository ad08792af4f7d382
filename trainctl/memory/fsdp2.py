"""Memory of one rank under torch's `fully_shard`, phase by phase.

Each function follows the behaviour of torch 2.13; file names in comments are under
``torch/distributed/fsdp/_fully_shard``. A unit is a block, or everything outside the blocks.
"""

from __future__ import annotations

from trainctl.memory.constants import FP32, LogitBytes
from trainctl.memory.engine import EngineMemory
from trainctl.memory.host import pinned_bytes
from trainctl.memory.rank import Components, RankMemory, head_input_bytes, logits_bytes, rank_memory
from trainctl.memory.rollout import rollout_phase
from trainctl.memory.stages import Stage
from trainctl.options.optimizer import Update
from trainctl.plans.types import LayoutPlan


def phases(
    plan: LayoutPlan,
    engine: EngineMemory,
    stage: Stage,
    runtime: int,
    *,
    logit_bytes: LogitBytes | None = None,
) -> dict[str, Components]:
    """Return the memory of one rank in each phase of a step, like
    `trainctl.memory.phases.phases`.
    """
    held = resident_components(engine, stage, runtime)
    rank = rank_memory(plan, engine, stage, held, logit_bytes)
    return {
        "load": held.plus(
            optimizer_states=-held.optimizer_states,
            weight_average=-held.weight_average,
            step_transient=FP32 * engine.share(stage.largest),
        ),
        "forward_end": _forward_end(rank),
        "backward_start": _backward_start(rank),
        "backward_end": _backward_end(rank),
        "step": _update_phase(rank),
        **rollout_phase(
            rank,
            # With the buffer in which the last block arrives.
            partitioned=engine.weight_bytes * (stage.parameters + stage.block_parameters),
            module=_gathered_weight_bytes(rank, buffers=1, blocks=1),
        ),
    }


def resident_components(engine: EngineMemory, stage: Stage, runtime: int) -> Components:
    """Return the permanent memory: fp32 shards (weights and masters at once) and states."""
    if engine.offloads_optimizer:
        return Components(runtime=runtime)
    own = engine.share(stage.parameters)
    return Components(
        parameters=FP32 * own,
        optimizer_states=engine.share(engine.moments(stage)),
        weight_average=engine.average_bytes * own,
        runtime=runtime,
    )


def offloaded_components(engine: EngineMemory, stage: Stage) -> dict[str, int]:
    """Return the host bytes per rank that `CPUOffloadPolicy` takes, by component."""
    if not engine.offloads_optimizer:
        return {}
    own = FP32 * engine.share(stage.parameters)
    return {
        "parameters": pinned_bytes(engine, own),
        "gradients": pinned_bytes(engine, own),
        "optimizer_states": engine.share(engine.moments(stage)),
        "weight_average": engine.average_bytes * engine.share(stage.parameters),
    }


def _elements_outside_blocks(stage: Stage) -> int:
    return stage.parameters - stage.blocks * stage.block_parameters


def _gathered_weight_bytes(rank: RankMemory, buffers: int, blocks: int) -> int:
    """Return the bytes of gathered weights: `blocks` blocks (all at stage 2), `buffers` buffers of
    a block, and the unit outside the blocks.

    The buffer of the last gather in the forward pass is kept (`wait_for_unshard`,
    _fsdp_param_group.py). The backward pass prefetches the next block if weights are gathered
    again.
    """
    stage = rank.stage
    whole = buffers + (stage.blocks if rank.engine.stage == 2 else blocks)
    return rank.engine.weight_bytes * (
        _elements_outside_blocks(stage) + whole * stage.block_parameters
    )


def _reduce_buffers(rank: RankMemory, elements: int) -> int:
    """Return the bytes of gradients in communication; on CPUs gloo reduces into a copy."""
    return FP32 * elements * (2 if rank.engine.on_cpu else 1)


def _accumulated_gradient_bytes(rank: RankMemory) -> int:
    """Return the bytes of gradients from earlier micro-batches of the step, sharded or whole."""
    engine, elements = rank.engine, rank.stage.parameters
    if not engine.accumulates:
        return 0
    if not engine.config.engine.reduce_every_micro_batch:  # type: ignore[attr-defined]
        return FP32 * elements
    return 0 if engine.offloads_optimizer else FP32 * engine.share(elements)


def _forward_end(rank: RankMemory) -> Components:
    """Return the memory with all activations, the loss, and the gather buffer of the last block."""
    return rank.resident.plus(
        activations=rank.activations.forward_end + head_input_bytes(rank),
        logits=logits_bytes(rank, rank.logit_bytes.forward),
        gradients=_accumulated_gradient_bytes(rank),
        gathered_parameters=_gathered_weight_bytes(rank, buffers=1, blocks=0),
    )


def _backward_start(rank: RankMemory) -> Components:
    """Return the fuller of two moments: the gradient of the logits, or the backward pass of the
    last block, while the block before it is gathered and fp32 gradients are reduced.
    """
    stage, weight = rank.stage, rank.engine.weight_bytes
    common = rank.resident.plus(activations=rank.activations.forward_end)
    loss = common.plus(
        activations=head_input_bytes(rank),
        logits=logits_bytes(rank, rank.logit_bytes.backward),
        gradients=_accumulated_gradient_bytes(rank),
        gathered_parameters=_gathered_weight_bytes(rank, buffers=1, blocks=0),
    )
    block = common.plus(
        activations=rank.activations.block_backward,
        gradients=_accumulated_gradient_bytes(rank)
        + weight * (stage.head + stage.block_parameters),
        communication_buffers=_reduce_buffers(rank, stage.block_parameters),
        gathered_parameters=_gathered_weight_bytes(rank, buffers=rank.engine.stage - 2, blocks=1),
    )
    return max(loss, block, key=lambda moment: moment.total)


def _backward_end(rank: RankMemory) -> Components:
    """Return the fuller of two moments: the embedding's gradient being added to a tied head's, or
    the gradients outside the blocks being reduced (`foreach_reduce`, _fsdp_collectives.py).
    """
    engine, stage = rank.engine, rank.stage
    outside, weight = _elements_outside_blocks(stage), engine.weight_bytes
    shards = 0 if engine.offloads_optimizer else FP32 * engine.share(stage.parameters)
    added = stage.embedding if outside < stage.embedding + stage.head else 0
    embedding = rank.resident.plus(
        activations=rank.activations.last_block,
        gradients=shards + weight * (outside + added),
        communication_buffers=_reduce_buffers(rank, stage.block_parameters),
        gathered_parameters=weight * outside,
    )
    sending = rank.resident.plus(
        gradients=shards + weight * outside, communication_buffers=_reduce_buffers(rank, outside)
    )
    return max(embedding, sending, key=lambda moment: moment.total)


def _update_phase(rank: RankMemory) -> Components:
    """Return the memory of the update, shard by shard or by one kernel for all shards."""
    if rank.engine.offloads_optimizer:
        return rank.resident
    own = rank.engine.share(rank.stage.parameters)
    return rank.resident.plus(
        gradients=FP32 * own, step_transient=_update_copy_bytes(rank, rank.engine.update)
    )


def _update_copy_bytes(rank: RankMemory, update: Update) -> int:
    largest = rank.engine.share(rank.stage.largest)
    group = max((rank.engine.share(each.elements) for each in rank.groups), default=0)
    return update.temporary_bytes(largest if update.by_tensor else group, largest)
