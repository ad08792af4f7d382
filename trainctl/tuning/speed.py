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
from math import ceil, log2
from typing import Any

from trainctl.config.keys import as_written
from trainctl.config.registry import changed_section
from trainctl.config.schema import ModelConfig, OffloadDevice, RunConfig
from trainctl.hardware import Hardware
from trainctl.memory.constants import BYTES
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
from trainctl.plans.derive import blocks_of_stages, derive_batch, derive_mesh
from trainctl.plans.flops import multiplied_weights
from trainctl.plans.settings import number_formats
from trainctl.plans.types import LayoutPlan, Mesh
from trainctl.tuning.compute import (
    ASSUMED_HOST_LINK_GB_PER_SECOND,
    ASSUMED_LINK_GB_PER_SECOND,
    ASSUMED_NETWORK_GB_PER_SECOND,
    COLLECTIVE_LATENCY,
    GIGA,
    HOST_LINK_SHARE,
    HOST_MEMORY_GB_PER_SECOND,
    KERNEL_START,
    KERNELS_OF_A_BLOCK,
    LINK_SHARE,
    NETWORK_SHARE,
    NVME_GB_PER_SECOND,
    OPTIMIZER_BYTES,
    OVERLAP,
    Rates,
    block_matrices,
    block_time,
    device_rates,
    head_time,
    stage_parameters,
    trained_share,
)


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Process group with its bandwidth."""

    ranks: int
    bandwidth: float
    """Bytes per second that each rank sends in a ring over all ranks."""
    on_a_machine: int
    """Number of ranks on one machine."""


class Links:
    """Process groups of a mesh on given machines, and the time of their collectives.

    Rank order is tensor fastest, then sequence, data and pipeline (`Mesh`), and machines are filled
    in this order. A ring over several machines enters and leaves each one through the network cards
    of all its members there, so the members on a machine share the traffic. ZeRO partitions over
    the group `zero`, the data and sequence ranks. The group `stage` is all ranks of a pipeline
    stage, and `pipeline` a chain of neighbouring stages.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh) -> None:
        share = LINK_SHARE * GIGA
        link = hardware.device_link_gb_per_second or ASSUMED_LINK_GB_PER_SECOND
        network = hardware.network_gb_per_second or ASSUMED_NETWORK_GB_PER_SECOND
        host = hardware.host_link_gb_per_second or ASSUMED_HOST_LINK_GB_PER_SECOND
        self._link = link * share
        self._network = network * NETWORK_SHARE * GIGA
        self._host = host * HOST_LINK_SHARE * GIGA
        self._node = hardware.devices_per_node
        self._nodes = hardware.nodes
        inner = mesh.tensor * mesh.sequence
        self.tensor = self._group(mesh.tensor, 1)
        self.sequence = self._group(mesh.sequence, mesh.tensor)
        self.zero = self._group(mesh.data * mesh.sequence, mesh.tensor)
        self.stage = self._group(inner * mesh.data, 1)
        self.pipeline = self._group(mesh.pipeline, inner * mesh.data)

    def near(self, ranks: int) -> RankGroup:
        """Return a group of neighbouring devices on one machine."""
        return RankGroup(ranks, self._link, ranks)

    def all_gather(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-gather, or a reduce-scatter, of `size` bytes in total."""
        if group.ranks == 1:
            return 0.0
        share = (group.ranks - 1) / group.ranks
        return share * size / group.bandwidth + self._latency(group)

    def all_reduce(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-reduce of `size` bytes: reduce-scatter plus all-gather."""
        return 2 * self.all_gather(size, group)

    def all_to_all(self, size: float, group: RankGroup) -> float:
        """Return the seconds of an all-to-all of `size` bytes per rank.

        Traffic inside a machine uses the device links, and at the same time traffic between
        machines uses the network.
        """
        if group.ranks == 1:
            return 0.0
        near = (group.on_a_machine - 1) / group.ranks * size / self._link
        far = (group.ranks - group.on_a_machine) / group.ranks * size / self._network
        return max(near, far) + self._latency(group)

    def send(self, size: float, group: RankGroup) -> float:
        """Return the seconds to send `size` bytes to the next stage; each pair has its own
        cards.
        """
        stage_is_inside = self._nodes == 1
        return size / (self._link if stage_is_inside else self._network)

    def from_host(self, size: float) -> float:
        """Return the seconds to copy `size` bytes between a device and its host."""
        return size / self._host

    def _group(self, ranks: int, stride: int) -> RankGroup:
        """Return the group of `ranks` ranks with the stride `stride`."""
        members = max(1, min(ranks, self._node // stride))
        if members >= ranks:
            return RankGroup(ranks, self._link, ranks)
        return RankGroup(ranks, min(self._link, members * self._network), members)

    def _latency(self, group: RankGroup) -> float:
        return COLLECTIVE_LATENCY * ceil(log2(group.ranks))


FP32 = 4


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
    """Generation of the answers that the step learns from, all as long as they may be."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> Mapping[str, float]:
        """Seconds by the name of the part; without `rollout` if the step has none."""
        found = {item.name: getattr(self, item.name) for item in fields(self)}
        return found if self.rollout else {k: v for k, v in found.items() if k != "rollout"}


def step_time(plan: LayoutPlan) -> StepTime:
    """Return the time of an optimizer step."""
    config, mesh, batch = plan.config, plan.mesh, plan.batch
    speed = device_rates(plan.hardware, config.precision)
    links = Links(plan.hardware, mesh)
    tokens = batch.micro_batch_size * -(-batch.sequence_length // mesh.sequence)
    element = BYTES[precision_of(config.precision).format]
    block = block_time(config, speed, tokens, batch.sequence_length, mesh.tensor)
    head = head_time(config, speed, tokens, mesh.tensor)
    activation = tokens * config.model.hidden_size * element
    again = 0.0 if checkpointing_of(config.activation_checkpointing).keeps_products else 1.0

    first = objective_of(config.objective).passes - 1  # forward passes before the one of the step

    # All-reduces after attention and the feed-forward layer, and as many in the backward pass.
    in_tensor = links.all_reduce(activation, links.tensor)
    # Ulysses: all-to-all of queries, keys, values and the result.
    exchanged = activation * (2 + 2 * _key_share(config.model)) / mesh.tensor
    in_sequence = links.all_to_all(exchanged, links.sequence)

    micro_batches, stages = batch.gradient_accumulation_steps, mesh.pipeline
    counts = plan.stage_blocks or (config.model.num_layers,)
    alike = {(blocks, i == 0, i == stages - 1) for i, blocks in enumerate(counts)}
    slowest, parts = 0.0, StepTime()
    for blocks, has_embedding, has_head in sorted(alike):
        wrapped = _recomputed_blocks(config, blocks)
        compute = blocks * block.both + (head if has_head else 0.0)
        compute += first * (blocks * block.forward + (head / 3 if has_head else 0.0))
        recompute = wrapped * block.again
        parameters = stage_parameters(config.model, blocks, mesh.tensor, has_embedding, has_head)
        gather, reduce = _gathering_seconds(plan, links, parameters, compute + recompute)
        transfer = 2 * links.send(activation, links.pipeline) if stages > 1 else 0.0
        one = StepTime(
            compute=compute,
            recompute=recompute,
            tensor=in_tensor * ((4 + 2 * first) * blocks + 2 * again * wrapped),
            sequence=in_sequence * (2 * blocks + again * wrapped),
            gather=gather * (1 + first / 2),
            reduce=reduce,
            transfer=transfer,
            offload=_offloaded_activations(plan, links, wrapped, activation),
        )
        every = _once_per_step_seconds(plan, links, parameters, speed, one.seconds * micro_batches)
        whole = _whole_matrix_seconds(plan, links, blocks, speed)
        every = replace(every, optimizer=every.optimizer + whole)
        total = one.seconds * (micro_batches + stages - 1) + every.seconds
        if total > slowest:
            slowest = total
            values = {
                name: seconds * micro_batches + every.parts[name]
                for name, seconds in one.parts.items()
            }
            parts = StepTime(**values | {"bubble": one.seconds * (stages - 1)})
    return replace(parts, rollout=_rollout_seconds(plan, links, speed, parts.compute / 3))


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


def _gathering_seconds(
    plan: LayoutPlan, links: Links, parameters: float, compute: float
) -> tuple[float, float]:
    """Return the unhidden seconds per micro-batch of stage 3's weight gathering, and of the
    gradient reduction at stages 2 and 3.

    Weights are gathered once forward and once backward, always on their own stream
    (zero/partitioned_param_coordinator.py). Gradients are reduced during the backward pass only
    with `overlap_comm`, and then share it with the gathering. Stage 2 all-reduces buckets and keeps
    its part of each (`allreduce_and_scatter`, zero/stage_1_and_2.py).
    """
    config = plan.config
    zero = config.zero_stage
    if zero.stage < 2:
        return 0.0, 0.0
    forward = backward = gather = 0.0
    if zero.stage == 3:
        size = BYTES[number_formats(config.precision).weights] * parameters
        sent = size / 2 if zero.quantized_weights else size
        near = links.near(zero.hpz_partition_size) if zero.hpz_partition_size > 1 else links.zero
        forward, backward = links.all_gather(sent, links.zero), links.all_gather(sent, near)
        if config.offload.parameters is not OffloadDevice.none:
            fetched = links.from_host(size / links.zero.ranks)
            forward, backward = forward + fetched, backward + fetched
        gather = _exposed_time(forward, compute / 3) + _exposed_time(backward, compute * 2 / 3)
    reduced = _reduced_bytes(plan, parameters * trained_share(config).weights)
    if zero.stage == 3:
        reduce = links.all_gather(reduced / (4 if zero.quantized_gradients else 1), links.zero)
    else:
        reduce = links.all_reduce(reduced, links.zero)
    if zero.overlap_comm:
        behind_backward = compute * 2 / 3
        reduce = _exposed_time(backward + reduce, behind_backward) - _exposed_time(
            backward, behind_backward
        )
    return gather, reduce


def _once_per_step_seconds(
    plan: LayoutPlan, links: Links, parameters: float, speed: Rates, compute: float
) -> StepTime:
    """Return the time of the work once per step: the reduction at stages 0 and 1 (like stage 2's),
    the update, and the gathering of updated weights at stages 1 and 2.
    """
    config = plan.config
    zero, offload = config.zero_stage, config.offload
    ranks = links.zero.ranks
    parameters *= trained_share(config).weights
    own = parameters if zero.stage == 0 else parameters / ranks
    size = BYTES[number_formats(config.precision).weights] * parameters
    reduce = 0.0
    if zero.stage < 2:
        reduce = links.all_reduce(_reduced_bytes(plan, parameters), links.zero)
        if zero.overlap_comm:
            # Only the last micro-batch's backward pass has gradients to reduce.
            last = compute / plan.batch.gradient_accumulation_steps * 2 / 3
            reduce = _exposed_time(reduce, last)
    if zero.stage in (1, 2):
        reduce += links.all_gather(size, links.zero)
    if offload.optimizer is OffloadDevice.none or zero.stage == 0:
        optimizer = own * OPTIMIZER_BYTES / speed.memory
        return StepTime(reduce=reduce, optimizer=optimizer)
    away = offload.ratio if zero.stage == 3 else 1.0
    on_machine = own * plan.hardware.devices_per_node
    bandwidth = HOST_MEMORY_GB_PER_SECOND * GIGA
    optimizer = on_machine * away * OPTIMIZER_BYTES / bandwidth
    optimizer += own * (1 - away) * OPTIMIZER_BYTES / speed.memory
    micro_batches = plan.batch.gradient_accumulation_steps
    # Each micro-batch copies gradients to the host; stages 1 and 2 also fetch and add earlier ones.
    copies = micro_batches if zero.stage == 3 else 3 * micro_batches - 2
    moved = links.from_host(size / ranks * away * (copies + 1))
    if offload.optimizer is OffloadDevice.nvme:
        # Master weights and moments in and out.
        moved += on_machine * 2 * 3 * FP32 / (NVME_GB_PER_SECOND * GIGA)
    if offload.parameters is OffloadDevice.nvme:
        size_there = on_machine * BYTES[number_formats(config.precision).weights]
        passes = 2 * micro_batches + 1
        moved += size_there * passes / (NVME_GB_PER_SECOND * GIGA)
    return StepTime(reduce=reduce, optimizer=optimizer, offload=moved)


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


def _key_share(model: ModelConfig) -> float:
    """Return the width of the keys divided by the width of the queries."""
    return shapes.key_value_heads(model) / model.num_attention_heads


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


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """Return the configuration with some keys changed; unchanged sections are shared."""
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        by_section.setdefault(section, {})[name] = value
    changed = {
        name: changed_section(getattr(config, name), **new) for name, new in by_section.items()
    }
    return replace(config, **changed)


def time_variant(
    config: RunConfig, hardware: Hardware, stage_blocks: tuple[int, ...] = ()
) -> TimedVariant | None:
    """Return the timed configuration; None if its mesh or batch is impossible.

    `stage_blocks` is the number of blocks of each pipeline stage, if known already.
    """
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
