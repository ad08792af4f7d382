"""Time of an optimizer step: a closed form over the plan, the hardware and few constants.

The step of the slowest pipeline stage is the sum of its sequential parts. Each part is work divided
by a rate: products by the achievable FLOP/s, the operations between them by the memory bandwidth,
collectives by the bandwidth of the links in their ring (Thakur et al. 2005, as NCCL does), the
host's optimizer by the host's memory bandwidth. Work that overlaps with computation counts only
where it is not hidden. `trainctl.tuning.compute` and `docs/planning.md` give the sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from operator import attrgetter
from typing import Any

from trainctl.config.keys import as_written
from trainctl.config.registry import changed_section
from trainctl.config.schema import ModelConfig, OffloadDevice, RunConfig
from trainctl.hardware import Hardware
from trainctl.memory.constants import BYTES, FP32
from trainctl.memory.rollout import (
    RolloutSize,
    answers_of_rank,
    cache_bytes_per_token,
    cache_reads,
    own_rollout,
)
from trainctl.options.activation_checkpointing import checkpointing_of, recomputing_section
from trainctl.options.engine import engine_of
from trainctl.options.objective import objective_of
from trainctl.options.optimizer import spec_of
from trainctl.options.precision import precision_of
from trainctl.plans import shapes
from trainctl.plans.derive import blocks_of_stages, derive_batch, derive_mesh, idle_micro_batches
from trainctl.plans.flops import multiplied_weights
from trainctl.plans.settings import number_formats
from trainctl.plans.types import LayoutPlan, Mesh
from trainctl.rules.kernel_choice import with_kernels
from trainctl.tuning.compute import (
    attention_seconds,
    block_matrices,
    block_time,
    head_time,
    stage_parameters,
    trained_share,
    updated_tensors,
)
from trainctl.tuning.rates import (
    FSDP2_STARTS,
    GIGA,
    HOST_MEMORY_GB_PER_SECOND,
    KERNEL_START,
    KERNELS_OF_A_BLOCK,
    NVME_GB_PER_SECOND,
    OPTIMIZER_BYTES,
    OVERLAP,
    UPDATE_STARTS,
    Links,
    RankGroup,
    Rates,
    device_rates,
    exchanged_bytes,
    expert_weights,
    sparse_share,
    tensor_sums,
)

TIME_ERROR = 0.25
"""Relative error of a predicted step that nine in ten published rows stay below, also of those that
no constant was fitted to (docs/planning.md, Accuracy).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of an optimizer step on the slowest rank, by part; the parts add up. Unhidden
    communication is the part that does not overlap with computation.
    """

    compute: float = 0.0
    """Forward and backward passes."""
    recompute: float = 0.0
    """Recomputed forward passes."""
    tensor: float = 0.0
    """Collectives of tensor parallelism in every block."""
    sequence: float = 0.0
    """Collectives of sequence parallelism in every block."""
    context: float = 0.0
    """Unhidden exchange of keys and values between context ranks."""
    experts: float = 0.0
    """Exchange of tokens between expert ranks in every sparse block."""
    gather: float = 0.0
    """Unhidden gathering of weights at ZeRO 3."""
    reduce: float = 0.0
    """Unhidden reduction of gradients and gathering of updated weights."""
    transfer: float = 0.0
    """Activations sent between pipeline stages."""
    bubble: float = 0.0
    """Pipeline bubble."""
    optimizer: float = 0.0
    offload: float = 0.0
    """Copies to and from host memory or NVMe."""
    rollout: float = 0.0
    """Generation of the answers that the step learns from, all as long as they may be, without
    the further rounds of `objective.dynamic_sampling`.
    """

    @property
    def seconds(self) -> float:
        return float(sum(_all_parts(self)))

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by the name of the part; without `context`, `experts` and `rollout` where the
        step has none.
        """
        found = zip(_PARTS, _all_parts(self), strict=True)
        return {name: seconds for name, seconds in found if seconds or name not in _RARE}


_PARTS = tuple(item.name for item in fields(StepTime))
_RARE = ("context", "experts", "rollout")
_all_parts = attrgetter(*_PARTS)


def step_time(plan: LayoutPlan) -> StepTime:
    """Return the time of an optimizer step."""
    config, mesh, batch = plan.config, plan.mesh, plan.batch
    speed = device_rates(plan.hardware, config.precision)
    links = Links(plan.hardware, mesh, plan.shard_ranks)
    tokens = batch.micro_batch_size * -(-batch.sequence_length // mesh.sequence_parts)
    element = BYTES[precision_of(config.precision).format]
    block = block_time(config, speed, tokens, batch.sequence_length, mesh.tensor, mesh.expert)
    head = head_time(config, speed, tokens, mesh.tensor)
    activation = tokens * config.model.hidden_size * element
    again = 0.0 if checkpointing_of(config.activation_checkpointing).keeps_products else 1.0

    first = objective_of(config.objective).passes - 1  # forward passes before the one of the step

    # All-reduces of a forward pass; there are as many in the backward pass.
    in_tensor = tensor_sums(config.model, mesh.expert) * links.all_reduce(activation, links.tensor)
    in_sequence = _ulysses_seconds(plan, links, activation)
    ring, ring_backward = _ring_seconds(plan, links, speed, tokens)
    # Tokens to their experts and back: two in either pass.
    in_experts = sparse_share(config.model) * links.all_to_all(
        exchanged_bytes(config, tokens, mesh), links.expert
    )

    micro_batches, idle = batch.gradient_accumulation_steps, idle_micro_batches(config.parallelism)
    # An activation and a gradient of each stage.
    sends = 2 * len(plan.stages_of(0)) if mesh.pipeline > 1 else 0
    slowest, parts = 0.0, StepTime()
    for blocks, has_embedding, has_head in sorted(_kinds_of_ranks(plan)):
        wrapped = _recomputed_blocks(config, blocks)
        compute = blocks * block.both + (head if has_head else 0.0)
        compute += first * (blocks * block.forward + (head / 3 if has_head else 0.0))
        recompute = wrapped * block.again
        held = _held_parameters(plan, links, blocks, has_embedding, has_head)
        gather, reduce = _gathering_seconds(plan, links, held, compute + recompute)
        one = StepTime(
            compute=compute,
            recompute=recompute,
            tensor=in_tensor * ((2 + first) * blocks + again * wrapped),
            sequence=in_sequence * (2 * blocks + again * wrapped),
            context=(ring + ring_backward) * blocks + ring * again * wrapped,
            experts=in_experts * ((4 + 2 * first) * blocks + 2 * again * wrapped),
            gather=gather * (1 + first / 2),
            reduce=reduce,
            transfer=sends * links.send(activation, links.pipeline),
            offload=_offloaded_activations(plan, links, wrapped, activation),
        )
        once = 0.0 if _reduces_each_time(config) else one.reduce
        one = replace(one, reduce=one.reduce - once)
        every = _once_per_step_seconds(plan, links, held, speed, one.seconds * micro_batches)
        whole = _whole_matrix_seconds(plan, links, blocks, speed)
        every = replace(every, optimizer=every.optimizer + whole, reduce=every.reduce + once)
        total = one.seconds * (micro_batches + idle) + every.seconds
        if total > slowest:
            slowest = total
            values = {
                name: seconds * micro_batches + getattr(every, name)
                for name, seconds in one.parts.items()
            }
            parts = StepTime(**values | {"bubble": one.seconds * idle})
    return replace(parts, rollout=_rollout_seconds(plan, links, speed, parts.compute / 3))


def _kinds_of_ranks(plan: LayoutPlan) -> set[tuple[int, bool, bool]]:
    """Return the numbers of blocks of the pipeline ranks, each with whether it has the embedding
    and the head. Blocks that predict further tokens are on the rank with the head.
    """
    model = plan.config.model
    *before, last = plan.stage_blocks or (model.num_layers,)
    counts = (*before, last + (model.future_blocks or 0))
    held = [plan.stages_of(rank) for rank in range(plan.mesh.pipeline)]
    return {(sum(counts[stage] for stage in own), 0 in own, len(counts) - 1 in own) for own in held}


def _ulysses_seconds(plan: LayoutPlan, links: Links, activation: float) -> float:
    """Return the seconds of the all-to-alls of queries, keys, values and the result of a block.

    `activation` is the bytes of the hidden states of a micro-batch on a rank.
    """
    share = _key_heads(plan.config.model, plan.mesh) / plan.config.model.num_attention_heads
    return links.all_to_all(activation * (2 / plan.mesh.tensor + 2 * share), links.sequence)


def _ring_seconds(plan: LayoutPlan, links: Links, speed: Rates, tokens: int) -> tuple[float, float]:
    """Return the seconds per block, forward and backward, that ring attention waits for keys.

    While a rank attends to the keys of one rank, those of the next one arrive. Backward, gradients
    in fp32 travel with them, and one hop further, which nothing hides.
    """
    config, mesh = plan.config, plan.mesh
    if mesh.context == 1:
        return 0.0, 0.0
    attention = attention_seconds(config, speed, tokens, plan.batch.sequence_length, mesh.tensor)
    elements = 2 * tokens * _key_heads(config.model, mesh) * shapes.attended_width(config.model)
    element = BYTES[precision_of(config.precision).format]
    turns = mesh.context - 1
    forward = links.pass_on(elements * element, links.context)
    backward = links.pass_on(elements * (element + FP32), links.context)
    hidden, hidden_backward = (each / mesh.context for each in attention)
    return turns * _exposed_time(forward, hidden), turns * _exposed_time(
        backward, hidden_backward
    ) + links.pass_on(elements * FP32, links.context)


def _rollout_seconds(plan: LayoutPlan, links: Links, speed: Rates, forward: float) -> float:
    """Return the seconds per step in which the engine generates answers, and scores them once or
    twice more by passes of `forward` seconds (`RolloutData._sample`, train/rollouts/steps.py).

    Each token reads all weights, and the cache of the answers that are generated side by side; with
    many of them its products take longer. Slots are never empty until the last answers.
    """
    section = own_rollout(plan)
    if section is None:
        return 0.0
    config, model, tensor = plan.config, plan.config.model, plan.mesh.tensor
    size = RolloutSize.of(plan)
    answers = answers_of_rank(plan, section)
    parameters = stage_parameters(model, model.num_layers, tensor, True, True)
    weights = BYTES[number_formats(config.precision).weights] * parameters
    mean_length = section.max_prompt_tokens + section.max_answer_tokens / 2
    cached = size.answers * mean_length * cache_bytes_per_token(plan) * cache_reads(model)
    products = 2 * multiplied_weights(model) / tensor / speed.products
    token = max(
        (weights + cached) / speed.memory,
        size.answers * products,
        model.num_layers * KERNELS_OF_A_BLOCK * KERNEL_START,
    )
    element = BYTES[precision_of(config.precision).format]
    hidden = size.answers * model.hidden_size * element
    token += 2 * model.num_layers * links.all_reduce(hidden, links.tensor)
    is_partitioned = config.zero_stage.stage == 3 or not engine_of(config).takes_json
    gathering = links.all_gather(weights, links.zero) if is_partitioned else 0.0
    tokens = ceil(answers / size.answers) * section.max_answer_tokens
    seconds = tokens * token + answers * section.max_prompt_tokens * products
    seconds += gathering * (1 if size.holds_weights else tokens)
    passes = (section.updates > 1) + (section.kl_weight > 0)
    return seconds / section.updates + passes * forward


Held = tuple[tuple[float, RankGroup], ...]
"""Parameters of a rank's stage, each number with the group that ZeRO partitions them over."""


def _held_parameters(
    plan: LayoutPlan, links: Links, blocks: int, has_embedding: bool, has_head: bool
) -> Held:
    """Return the parameters of a rank of a pipeline stage, experts on other ranks excluded."""
    model, mesh = plan.config.model, plan.mesh
    whole = stage_parameters(model, blocks, mesh.tensor, has_embedding, has_head)
    if mesh.expert == 1:
        return ((whole, links.zero),)
    experts = expert_weights(model) * blocks / model.num_layers / mesh.tensor
    own = experts / mesh.expert
    return (whole - experts, links.zero), (own, links.expert_replicas)


def _gathering_seconds(
    plan: LayoutPlan, links: Links, held: Held, compute: float
) -> tuple[float, float]:
    """Return the unhidden seconds per micro-batch of weight gathering, and of the gradient
    reduction at stages 2 and 3.

    Stage 3 gathers weights once forward and once backward, always on their own stream
    (zero/partitioned_param_coordinator.py). Gradients are reduced during the backward pass only
    with `overlap_comm`, and then share it with the gathering. DeepSpeed's stage 2 all-reduces
    buckets and keeps its part of each (`allreduce_and_scatter`, zero/stage_1_and_2.py). FSDP2's
    gathers in the forward pass alone, and reduces as stage 3 does, on a stream of its own.
    """
    config = plan.config
    zero, is_torch = config.zero_stage, not engine_of(config).takes_json
    if zero.stage < 2:
        return 0.0, 0.0
    forward = backward = gather = reduce = 0.0
    trained = trained_share(config).weights
    for parameters, group in held:
        reduced = _reduced_bytes(plan, parameters * trained)
        if zero.stage == 2 and not is_torch:
            reduce += links.all_reduce(reduced, group)
            continue
        reduce += links.all_gather(reduced / (4 if zero.quantized_gradients else 1), group)
        size = BYTES[number_formats(config.precision).weights] * parameters
        sent = size / 2 if zero.quantized_weights else size
        near = links.near(zero.hpz_partition_size) if zero.hpz_partition_size > 1 else group
        fetched = 0.0
        if config.offload.parameters is not OffloadDevice.none:
            fetched = links.from_host(size / group.ranks)
        forward += links.all_gather(sent, group) + fetched
        backward += links.all_gather(sent, near) + fetched if zero.stage == 3 else 0.0
    if zero.stage == 3 or is_torch:
        gather = _exposed_time(forward, compute / 3) + _exposed_time(backward, compute * 2 / 3)
    if zero.overlap_comm or is_torch:
        behind_backward = compute * 2 / 3
        reduce = _exposed_time(backward + reduce, behind_backward) - _exposed_time(
            backward, behind_backward
        )
    return gather, reduce


def _reduces_each_time(config: RunConfig) -> bool:
    """Return False if an engine with gradients in shards reduces them in the last micro-batch
    alone (`Fsdp2Config`).
    """
    return getattr(config.engine, "reduce_every_micro_batch", True)


def _once_per_step_seconds(
    plan: LayoutPlan, links: Links, held: Held, speed: Rates, compute: float
) -> StepTime:
    """Return the time of the work once per step: the reduction at stages 0 and 1 (like stage 2's),
    the sum of HSDP's shards over the groups (under offload that of each micro-batch), the update,
    and DeepSpeed's gathering of updated weights at stages 1 and 2.
    """
    config = plan.config
    zero, offload = config.zero_stage, config.offload
    trained = trained_share(config).weights
    own = sum(each * trained / (group.ranks if zero.stage else 1) for each, group in held)
    width = BYTES[number_formats(config.precision).weights]
    reduced = ((_reduced_bytes(plan, each * trained), group) for each, group in held)
    if zero.stage < 2:
        reduce = sum(links.all_reduce(size, group) for size, group in reduced)
    else:
        reduce = sum(links.all_reduce(size / g.ranks, links.copies) for size, g in reduced)
    is_torch = not engine_of(config).takes_json
    if zero.overlap_comm or is_torch:
        # Only the last micro-batch's backward pass has gradients to reduce.
        last = compute / plan.batch.gradient_accumulation_steps * 2 / 3
        reduce = _exposed_time(reduce, last)
    is_away = offload.parameters is not OffloadDevice.none
    if zero.stage > 1 and is_away and _reduces_each_time(config):
        # Partial sums would stay on the device: each micro-batch sums over the groups.
        reduce *= plan.batch.gradient_accumulation_steps
    if zero.stage in (1, 2) and not is_torch:
        reduce += sum(links.all_gather(width * each * trained, group) for each, group in held)
    if offload.optimizer is OffloadDevice.none or zero.stage == 0:
        optimizer = own * OPTIMIZER_BYTES / speed.memory + _update_on_host(plan)
        return StepTime(reduce=reduce, optimizer=optimizer)
    away = offload.ratio if zero.stage == 3 else 1.0
    on_machine = own * plan.hardware.devices_per_node
    bandwidth = HOST_MEMORY_GB_PER_SECOND * GIGA
    optimizer = on_machine * away * OPTIMIZER_BYTES / bandwidth
    optimizer += own * (1 - away) * OPTIMIZER_BYTES / speed.memory
    micro_batches = plan.batch.gradient_accumulation_steps
    # Each micro-batch copies gradients to the host; stages 1 and 2 also fetch and add earlier ones.
    copies = micro_batches if zero.stage == 3 else 3 * micro_batches - 2
    moved = links.from_host(width * own * away * (copies + 1))
    if offload.optimizer is OffloadDevice.nvme:
        # Master weights and moments in and out.
        moved += on_machine * 2 * 3 * FP32 / (NVME_GB_PER_SECOND * GIGA)
    if offload.parameters is OffloadDevice.nvme:
        size_there = on_machine * width
        passes = 2 * micro_batches + 1
        moved += size_there * passes / (NVME_GB_PER_SECOND * GIGA)
    return StepTime(reduce=reduce, optimizer=optimizer, offload=moved)


def _update_on_host(plan: LayoutPlan) -> float:
    """Return the seconds in which the host gets each tensor ready for the kernels of the update,
    which start after the gradients' norm has been read.
    """
    engine = engine_of(plan.config)
    starts = UPDATE_STARTS[plan.config.zero_stage.stage] if engine.takes_json else FSDP2_STARTS
    return starts * KERNEL_START * updated_tensors(plan.config) / plan.mesh.pipeline


def _whole_matrix_seconds(plan: LayoutPlan, links: Links, blocks: int, speed: Rates) -> float:
    """Return the seconds that an update of whole matrices takes beyond an elementwise one
    (train/optimizers); the embedding, the head and exchanges of replicas are neglected.

    Muon orthogonalises each matrix on one of the ranks that share it, with ZeRO as many at once as
    there are ranks. Tensor ranks send it there and back within their group, unless ZeRO 3 cuts
    every matrix. Others sum over the ranks that share a matrix: matrix by matrix, with ZeRO once
    for a group of parameters.
    """
    config, stage, tensor = plan.config, plan.config.zero_stage.stage, plan.mesh.tensor
    spec = spec_of(config.optimizer)
    if not config.trains_itself or not (spec.has_matrix_rule or spec.all_reduces):
        return 0.0
    count, lines, products = (blocks * each for each in block_matrices(config.model))
    if not spec.has_matrix_rule:
        calls = spec.all_reduces * (1 if stage else count)
        summed = FP32 * (lines if spec.has_factored_states else 4 * count) / calls
        group = links.stage if stage else links.tensor
        return calls * links.all_reduce(summed, group) if tensor > 1 else 0.0
    sharers = tensor * links.zero.ranks if stage else 1
    seconds = products / sharers / speed.wide_products
    if tensor > 1:
        own = stage_parameters(config.model, blocks, 1, False, False) / sharers
        sent, rounds = BYTES[precision_of(config.precision).format] * own, max(1.0, count / sharers)
        group = links.stage if stage == 3 else links.tensor
        seconds += 2 * rounds * links.all_to_all(sent / rounds, group)
    return seconds


def _reduced_bytes(plan: LayoutPlan, parameters: float) -> float:
    return BYTES[number_formats(plan.config.precision).communication] * parameters


def _offloaded_activations(
    plan: LayoutPlan, links: Links, wrapped: int, activation: float
) -> float:
    """Return the seconds per micro-batch of copying block inputs to the host and back. The copies
    are on the compute stream (train/models/recompute.py), so nothing hides them.
    """
    settings, tensor = recomputing_section(plan.config), plan.mesh.tensor
    if settings is None or not settings.offload_to_cpu:
        return 0.0
    share = tensor if settings.partition_across_tensor_ranks else 1
    return links.from_host(2.0 * wrapped * activation / share)


def _exposed_time(communication: float, compute: float) -> float:
    """Return the seconds of communication that concurrent computation does not hide."""
    return max(communication * (1 - OVERLAP), communication - OVERLAP * compute)


def _recomputed_blocks(config: RunConfig, blocks: int) -> int:
    """Return the recomputed blocks of a stage: an upper bound wherever it begins in the model."""
    settings = recomputing_section(config)
    return 0 if settings is None else ceil(blocks / settings.every_kth_block)


def _key_heads(model: ModelConfig, mesh: Mesh) -> float:
    """Return the heads of a tensor rank's keys, which are repeated for more ranks than heads."""
    return max(shapes.key_value_heads(model) / mesh.tensor, mesh.sequence, 1)


Values = Mapping[str, Any]
"""Dotted keys and their new values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedVariant:
    """Variant with its speed; neither its legality nor its memory is checked yet."""

    sketch: LayoutPlan
    """Input of the step-time model and the device budget."""
    time: StepTime
    """Predicted time of an optimizer step."""

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token of all devices together; comparable between different batch sizes."""
        return self.time.seconds / self.sketch.batch.tokens_per_step


def with_values(
    config: RunConfig, values: Values, known: dict[str, Any] | None = None
) -> RunConfig:
    """Return the configuration with some keys changed; unchanged sections are shared.

    `known` has the sections that earlier calls for the same `config` have made.
    """
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        by_section.setdefault(section, {})[name] = value
    known = {} if known is None else known
    changed = {}
    for name, new in by_section.items():
        made = f"{name} {new}"
        if made not in known:
            known[made] = changed_section(getattr(config, name), **new)
        changed[name] = known[made]
    return replace(config, **changed)


def time_variant(
    config: RunConfig, hardware: Hardware, stage_blocks: tuple[int, ...] = ()
) -> TimedVariant | None:
    """Return the timed configuration; None if its mesh or batch is impossible.

    `stage_blocks` is the number of blocks of each pipeline stage, if known already.
    """
    config = with_kernels(config, hardware)
    mesh, _ = derive_mesh(config.parallelism, hardware)
    batch, _ = derive_batch(config.training, mesh.data) if mesh else (None, ())
    if mesh is None or batch is None:
        return None
    if batch.micro_batch_size < 1 or batch.gradient_accumulation_steps < 1:
        return None
    blocks = stage_blocks or blocks_of_stages(
        config.model, config.parallelism, sequence_length=batch.sequence_length
    )
    sketch = LayoutPlan(
        config=config, hardware=hardware, mesh=mesh, batch=batch, stage_blocks=blocks
    )
    return TimedVariant(sketch=sketch, time=step_time(sketch))


def overrides(values: Values) -> tuple[str, ...]:
    """Return the values as command-line overrides."""
    return tuple(f"{key}={as_written(value)}" for key, value in values.items())
