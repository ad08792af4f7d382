"""Memory of one rank of a pipeline stage, phase by phase.

Each function follows the behaviour of DeepSpeed 0.19; file names in comments are under
``deepspeed/runtime``. The peak is the largest phase, never the sum of all components.
"""

from __future__ import annotations

from trainctl.memory.activations import compute_bytes, tokens_per_rank
from trainctl.memory.constants import FP32, STAGE0_ALLREDUCE_ELEMENTS, LogitBytes
from trainctl.memory.engine import EngineMemory
from trainctl.memory.rank import (
    Components,
    RankMemory,
    fused_head_bytes,
    head_input_bytes,
    logits_bytes,
    micro_batches_in_flight,
    rank_memory,
)
from trainctl.memory.rollout import rollout_phase
from trainctl.memory.stages import Stage
from trainctl.options.model import spec_of
from trainctl.options.precision import is_emulated, precision_of
from trainctl.plans.gathering import gathers_blocks, prefetched_elements
from trainctl.plans.types import LayoutPlan


def phases(
    plan: LayoutPlan,
    engine: EngineMemory,
    stage: Stage,
    runtime: int,
    *,
    logit_bytes: LogitBytes | None = None,
) -> dict[str, Components]:
    """Return the memory of one rank of `stage` in each phase of a step.

    `runtime` is the bytes of the process outside tensors. `logit_bytes` is None for trainctl's
    plain loss.
    """
    rank = rank_memory(
        plan, engine, stage, resident_components(engine, stage, runtime), logit_bytes
    )
    return {
        "load": _construction_phase(rank, runtime),
        "forward_end": _forward_end(rank),
        "backward_start": _backward_start(rank),
        "backward_end": _backward_end(rank),
        "step": _update_phase(rank),
        **rollout_phase(
            rank,
            partitioned=_partitioned_weight_bytes(rank),
            module=_gathered_weight_bytes(rank, max(stage.block_parameters, stage.head)),
        ),
    }


def resident_components(engine: EngineMemory, stage: Stage, runtime: int) -> Components:
    """Return the permanent memory: weights, master weights, states and permanent buffers."""
    trained = stage.trained
    elements = trained.parameters
    on_device = 1.0
    if engine.offloads_optimizer:
        on_device = engine.device_share_of_offload(engine.groups(stage))
    own = int(engine.optimized(trained.partitioned if engine.stage else elements) * on_device)
    moments = engine.moments(stage)
    if engine.stage:
        moments = engine.share(moments)
    result = Components(
        parameters=_resident_weight_bytes(engine, stage),
        master_weights=engine.master_bytes * own if engine.has_master else 0,
        optimizer_states=int(moments * on_device),
        weight_average=engine.average_bytes * own,
        runtime=runtime,
    )
    if engine.uses_bf16_optimizer:
        result = result.plus(gradients=FP32 * elements)
    if engine.stage in (1, 2) and engine.offloads_optimizer:
        # temp_grad_buffer_for_gpu_offload (zero/stage_1_and_2.py).
        result = result.plus(communication_buffers=engine.weight_bytes * trained.largest)
    if engine.stage == 3:
        kept = engine.share(trained.partitioned) * engine.gradient_bytes
        # Offloaded gradients live with the optimizer; the part that stays on the device keeps
        # fp32 gradients.
        result = result.plus(
            gradients=FP32 * own if engine.offloads_optimizer else kept,
            communication_buffers=engine.communication_bytes * _bucket_elements(engine, elements),
            gathered_parameters=0
            if _shard_is_whole_model(engine)
            else _unpartitioned_bytes(engine, stage),
        )
    return result


def _resident_weight_bytes(engine: EngineMemory, stage: Stage) -> int:
    """Return the bytes of the weights that stay on the device between uses."""
    if engine.stage < 3:
        return stage.bytes(engine.weight_bytes)
    own = engine.share(stage.partitioned_bytes(engine.weight_bytes))
    return 0 if engine.offloads_parameters else own


def _bucket_elements(engine: EngineMemory, elements: int) -> int:
    """Return the elements of a reduce bucket. It is allocated whole, but a CPU backs only the pages
    that are written to.
    """
    size = engine.zero.reduce_bucket_size
    return min(size, elements) if engine.on_cpu else size


def _unpartitioned_bytes(engine: EngineMemory, stage: Stage) -> int:
    """Return the bytes kept whole at stage 3: small tensors, and ZeRO++'s secondary partition."""
    whole = _persistent_bytes(engine, stage)
    hpz = engine.zero.hpz_partition_size
    return whole + (-(-stage.bytes(engine.weight_bytes) // hpz) if hpz > 1 else 0)


def _persistent_bytes(engine: EngineMemory, stage: Stage) -> int:
    """Return the bytes of small tensors, which stage 3 gathers once and keeps."""
    threshold = engine.zero.param_persistence_threshold
    return stage.bytes_below(threshold, engine.weight_bytes, engine.ranks)


def _partitioned_weight_bytes(rank: RankMemory) -> int:
    """Return the bytes of all weights that stage 3 gathers, together."""
    engine, stage = rank.engine, rank.stage
    if engine.stage < 3 or _shard_is_whole_model(engine):
        return 0
    return stage.bytes(engine.weight_bytes) - _persistent_bytes(engine, stage)


def _gathered_weight_bytes(
    rank: RankMemory, module: int, *, outside: int = 0, turning: bool = False
) -> int:
    """Return the bytes of weights gathered at stage 3 while a module of `module` elements runs;
    `outside` of them are in no block. `turning` is the turn from forward to backward.

    Each unit that is gathered, with weights or without, prefetches `prefetched_elements` more, in
    whole tensors. So the prefetched weights grow up to `max_live_parameters` plus one tensor
    (`_fetch_sub_module_impl`, zero/partitioned_param_coordinator.py). Towards the end of the
    backward pass nothing is left to prefetch. Without prefetching, a weight stays gathered if it is
    used again within `max_reuse_distance` elements (`__params_to_release`): at the turn from
    forward to backward, these are the last half of that distance, or the last third with
    recomputation, which passes each block three times.
    """
    engine = rank.engine
    if engine.stage < 3 or _shard_is_whole_model(engine):
        return 0
    limit, ahead = max(engine.zero.max_live_parameters, module), prefetched_elements(engine.config)
    live = min(module + ahead, limit)
    if turning:
        reuse = engine.zero.max_reuse_distance // (3 if rank.recomputes else 2)
        # Blocks are whole: one that is partly within the distance stays gathered.
        reuse += rank.stage.block_parameters if gathers_blocks(engine.config) else 0
        live = max(live, min(reuse + module, limit))
        if ahead:
            live = max(live, limit + rank.stage.largest_in_block)
    # Weights that autograd retains are gathered too: count them once.
    retained = (
        _retained_weight_bytes(rank) // engine.weight_bytes
        if turning and not engine.autocast
        else 0
    )
    size = _live_parameter_bytes(rank, min(live, max(rank.stage.parameters - retained, 0)), outside)
    if engine.zero.quantized_weights:
        # Weights arrive as int8 and are expanded into a separate tensor.
        size += min(module + ahead, limit, rank.stage.parameters)
    return size


def _live_parameter_bytes(rank: RankMemory, elements: int, outside: int) -> int:
    """Return the bytes of `elements` gathered elements, `outside` of them in no block.

    DeepSpeed counts elements: in blocks quantized to 8 or 4 bits, most elements are bytes.
    """
    weight_bytes, stage = rank.engine.weight_bytes, rank.stage
    if not stage.largest_expanded:
        return weight_bytes * elements
    inside = min(max(elements - outside, 0), stage.blocks * stage.block_parameters)
    each = stage.block_bytes(weight_bytes) / stage.block_parameters
    return weight_bytes * (elements - inside) + round(each * inside)


def _retained_weight_bytes(rank: RankMemory) -> int:
    """Return the bytes of weights that autograd keeps from forward to backward.

    Stage 3 releases them because DeepSpeed replaces `torch.nn.functional.linear` (zero/linear.py);
    GPT-2's Conv1D does not go through it. Autocast's casts are always kept.
    """
    engine, stage = rank.engine, rank.stage
    matrices = sum(
        piece.total
        for piece in stage.pieces
        if piece.is_matrix and piece.in_block and not piece.expanded
    )
    if rank.recomputes:
        matrices //= max(stage.blocks, 1)
    if engine.autocast:
        return compute_bytes(rank.plan) * matrices
    uses_linear = not spec_of(rank.plan.config.model).inputs_first
    if (
        engine.stage < 3
        or _shard_is_whole_model(engine)
        or (engine.memory_efficient_linear and uses_linear)
    ):
        return 0
    return engine.weight_bytes * matrices


def _shard_is_whole_model(engine: EngineMemory) -> bool:
    """Return True if stage 3's shard is the whole model and on the device, so that nothing is
    gathered (`_no_gather_coalesced`, zero/partition_parameters.py).
    """
    return engine.ranks == 1 and not engine.offloads_parameters


def _accumulated_gradient_components(rank: RankMemory) -> dict[str, int]:
    """Return gradients, and at stage 1 the bucket, from earlier micro-batches of the step."""
    engine = rank.engine
    if not engine.accumulates:
        return {}
    bucket = _reduction_bucket_bytes(rank) if engine.stage == 1 else 0
    return {"gradients": _gradient_bytes(rank), "communication_buffers": bucket}


def _gradient_bytes(rank: RankMemory) -> int:
    """Return the bytes of gradients at the end of the backward pass, beyond the resident ones."""
    engine, elements = rank.engine, rank.trained.parameters
    if engine.uses_bf16_optimizer:
        return engine.weight_bytes * elements
    if engine.stage < 2:
        return engine.gradient_bytes * elements
    if engine.stage == 3 or engine.offloads_optimizer:
        return 0
    return engine.gradient_bytes * engine.share(rank.trained.partitioned)


def _reduction_bucket_bytes(rank: RankMemory) -> int:
    """Return the bytes of buckets while gradients are reduced, beyond the resident ones."""
    engine, elements = rank.engine, rank.trained.parameters
    if engine.stage == 0:
        if engine.ranks == 1:
            return 0
        return engine.communication_bytes * min(STAGE0_ALLREDUCE_ELEMENTS, elements)
    if engine.uses_bf16_optimizer:
        return 0
    if engine.stage == 3 and engine.zero.quantized_gradients and rank.plan.hardware.nodes > 1:
        # One tensor at a time, half a byte an element, sent and received (all_to_all_quant_reduce).
        return min(rank.trained.largest, elements)
    if engine.stage == 3:
        # torch.cat of a bucket (comm/coalesced_collectives.py).
        return engine.communication_bytes * min(engine.zero.reduce_bucket_size, elements)
    buffers = 2 if engine.zero.overlap_comm else 1
    size = buffers * engine.weight_bytes * _bucket_elements(engine, elements)
    if engine.communication_bytes != engine.weight_bytes:
        size += engine.communication_bytes * min(engine.zero.reduce_bucket_size, elements)
    return size


def _all_to_all_bytes(rank: RankMemory) -> int:
    """Return the bytes of one layer's token rows sent to and received from experts on other ranks.
    Both are equally many if experts are equally busy.
    """
    plan = rank.plan
    if plan.mesh.expert == 1:
        return 0
    rows = tokens_per_rank(plan) * (plan.config.model.experts_per_token or 1) // plan.mesh.tensor
    return 2 * rows * plan.config.model.hidden_size * compute_bytes(plan)


def _forward_end(rank: RankMemory) -> Components:
    """Return the memory with all activations and the loss of the last micro-batch in flight."""
    return rank.resident.plus(
        activations=rank.activations.forward_end
        + head_input_bytes(rank)
        + _pipeline_buffers(rank)
        + _all_to_all_bytes(rank),
        logits=logits_bytes(rank, rank.logit_bytes.forward) + fused_head_bytes(rank),
        gathered_parameters=_gathered_weight_bytes(
            rank, rank.stage.head, outside=rank.stage.head, turning=True
        ),
        retained_weights=_retained_weight_bytes(rank),
        **_accumulated_gradient_components(rank),
    )


def _backward_start(rank: RankMemory) -> Components:
    """Return the fuller of two moments: the gradient of the logits, or the backward pass of the
    last block, which is the first to run backward.
    """
    engine, stage = rank.engine, rank.stage
    common = rank.resident.plus(
        activations=rank.activations.forward_end
        + _pipeline_buffers(rank)
        + _all_to_all_bytes(rank),
        retained_weights=_retained_weight_bytes(rank),
    )
    loss = common.plus(
        activations=head_input_bytes(rank),
        logits=logits_bytes(rank, rank.logit_bytes.backward),
        gathered_parameters=_gathered_weight_bytes(
            rank, stage.head, outside=stage.head, turning=True
        ),
        **_accumulated_gradient_components(rank),
    )
    trained = rank.trained
    in_flight = trained.largest_in_block if engine.stage > 1 or engine.accumulates else trained.head
    block = common.plus(
        activations=rank.activations.block_backward
        + _fp8_operand_bytes(rank)
        + _dora_weight_bytes(rank)
        + _dequantized_matrix_bytes(rank),
        gradients=_accumulated_gradient_components(rank).get("gradients", 0)
        + engine.weight_bytes * in_flight,
        communication_buffers=_reduction_bucket_bytes(rank) if engine.stage else 0,
        gathered_parameters=_gathered_weight_bytes(rank, stage.block_parameters, turning=True),
    )
    return max(loss, block, key=lambda moment: moment.total)


def _backward_end(rank: RankMemory) -> Components:
    """Return the memory with all gradients, the first block's activations, and the embedding's
    gradient.
    """
    engine, stage = rank.engine, rank.stage
    trained = rank.trained
    embedding = 0 if engine.stage < 2 and not engine.accumulates else trained.embedding
    in_flight = max(embedding, trained.largest_in_block if engine.stage else 0)
    return rank.resident.plus(
        activations=rank.activations.last_block
        + _fp8_operand_bytes(rank)
        + _dequantized_matrix_bytes(rank),
        gradients=_gradient_bytes(rank) + engine.weight_bytes * in_flight,
        communication_buffers=_reduction_bucket_bytes(rank),
        gathered_parameters=max(
            _gathered_weight_bytes(rank, stage.block_parameters),
            _gathered_weight_bytes(rank, stage.embedding, outside=stage.embedding),
        ),
    )


def _fp8_operand_bytes(rank: RankMemory) -> int:
    """Return the bytes of the operands of one fp8 product: a gradient, and a weight or an input.

    torchao keeps the 16-bit originals and casts for each product; emulated fp8 casts to fp32.
    """
    precision, stage = rank.plan.config.precision, rank.stage
    narrow = precision_of(precision).product_bytes
    if narrow is None or not stage.blocks:
        return 0
    model, tokens = rank.plan.config.model, tokens_per_rank(rank.plan)
    inner = -(-model.intermediate_size // rank.plan.mesh.tensor)
    element = FP32 if is_emulated(precision) else narrow
    return element * (tokens * inner + max(stage.largest_in_block, tokens * model.hidden_size))


def _dora_weight_bytes(rank: RankMemory) -> int:
    """Return the bytes of W + s B A and its two parts during recomputation of a block. DoRA takes
    the row norms of the sum (`DoraLayer`, train/adapters/layers.py).
    """
    has_magnitudes = any(each.magnitudes for each, _ in rank.stage.learning or ())
    if not (has_magnitudes and rank.recomputes):
        return 0
    largest = rank.stage.largest_expanded or rank.stage.largest_in_block
    return 3 * rank.engine.weight_bytes * largest


def _dequantized_matrix_bytes(rank: RankMemory) -> int:
    """Return the bytes of one matrix of 8 or 4 bits expanded to the compute type. Each matrix is
    expanded for a product and then released (`_Product`, train/adapters/quantized.py).
    """
    return compute_bytes(rank.plan) * rank.stage.largest_expanded


def _pipeline_buffers(rank: RankMemory) -> int:
    """Return the bytes of the outputs that a pipeline stage keeps for each micro-batch in flight,
    and of the gradient that it receives for one (`pipe_buffers`, pipe/engine.py).
    """
    output = tokens_per_rank(rank.plan) * rank.plan.config.model.hidden_size
    sending = (part for part in rank.stage.parts if not part.has_head)
    held = sum(micro_batches_in_flight(rank.plan, part) + 1 for part in sending)
    return held * compute_bytes(rank.plan) * output


def _update_phase(rank: RankMemory) -> Components:
    """Return the fuller of two moments of the update: gradients being copied to the master's type,
    or the update with its temporaries, one parameter group (stage 3: sub-group) at a time.
    """
    engine, busiest = rank.engine, rank.busiest
    update = rank.update
    if engine.offloads_optimizer:
        on_device = engine.device_share_of_offload(rank.groups) > 0
        return rank.resident.plus(step_transient=update if on_device else 0)
    if engine.stage == 0:
        return _unpartitioned_update_phase(rank)
    if engine.uses_bf16_optimizer:
        return rank.resident.plus(gradients=_gradient_bytes(rank), step_transient=update)
    # flatten() copies the partition, .to() copies it again unless the types agree
    # (zero/stage_1_and_2.py step, zero/stage3.py _prepare_fp32_grad_for_sub_group).
    flat = engine.gradient_bytes * busiest
    cast = engine.master_bytes * busiest if engine.master_bytes != engine.gradient_bytes else 0
    own = 0 if engine.stage == 3 else engine.gradient_bytes * engine.share(rank.trained.partitioned)
    freed = min(own, flat)
    copying = rank.resident.plus(gradients=own, step_transient=flat + cast)
    updating = rank.resident.plus(gradients=own - freed, step_transient=(cast or flat) + update)
    return max(copying, updating, key=lambda moment: moment.total)


def _unpartitioned_update_phase(rank: RankMemory) -> Components:
    """Return the memory of the update at stage 0: torch's optimizer on fp32 weights, otherwise
    DeepSpeed's fp32 copies of all gradients (fp16/unfused_optimizer.py; fp16/fused_optimizer.py
    flattens them once more).
    """
    engine, elements = rank.engine, rank.trained.parameters
    copies = 1 if engine.has_master else 0
    return rank.resident.plus(
        gradients=_gradient_bytes(rank),
        step_transient=copies * engine.master_bytes * elements + rank.update,
    )


def _construction_phase(rank: RankMemory, runtime: int) -> Components:
    """Return the fuller of two moments of engine construction: weights being moved into one buffer,
    or the partition being copied to the master weights (converted, then cloned).
    """
    engine, stage = rank.engine, rank.stage
    if engine.stage < 3:
        whole = stage.bytes(engine.weight_bytes)
        moved = engine.weight_bytes * max((each.elements for each in rank.groups), default=0)
        if not engine.has_master:
            moved = 0
        weights = Components(parameters=whole, runtime=runtime)
    else:
        # One block at a time is whole while the model is built (zero.Init), before `defragment`.
        one_block = max(
            stage.block_bytes(engine.weight_bytes), engine.weight_bytes * stage.embedding
        )
        moved = max(rank.resident.parameters - one_block, 0)
        weights = Components(
            parameters=rank.resident.parameters,
            gathered_parameters=rank.resident.gathered_parameters + one_block,
            runtime=runtime,
        )
    master = rank.resident.master_weights
    copied = engine.master_bytes * rank.busiest if master else 0
    moments = 0
    if engine.stage == 0 and master:
        # A first step on zero gradients makes the moments here (fp16/unfused_optimizer.py).
        moments, copied = rank.resident.optimizer_states, master
    return max(
        weights.plus(step_transient=moved),
        weights.plus(master_weights=master, optimizer_states=moments, step_transient=copied),
        key=lambda moment: moment.total,
    )
