"""Rates that hardware reaches, the time of collectives, and the constants of the step-time model.

The constants are every number of the step-time model that is neither a fact of the hardware nor
derived. Facts of a device are keys of `hardware` (`conf/hardware/`). Fractions of peak rates, and
the host's memory bandwidth, are fitted to the published measurements of
`tests/data/throughput.csv` marked `fit`; `tests/tuning/test_speed.py` tests against the others.
`docs/planning.md` states the accuracy.

Of routed experts it is the time of grouped products, routing, and the exchange of tokens. Every
rank of the expert axis holds a part of each layer's experts and gets the tokens that all ranks
route to them (arXiv:2006.16668). A layer ends with its busiest rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log, log2, sqrt

from trainctl.config.schema import ModelConfig, PrecisionConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.memory.constants import BYTES
from trainctl.models.anatomy import Anatomy, Role
from trainctl.options.precision import is_emulated, precision_of
from trainctl.plans import shapes
from trainctl.plans.types import Mesh

GIGA = 1e9
TERA = 1e12

# Assumed where the hardware states nothing: an A100.
ASSUMED_PEAK_TFLOPS = 312.0
ASSUMED_MEMORY_GB_PER_SECOND = 2000.0
ASSUMED_LINK_GB_PER_SECOND = 300.0
ASSUMED_NETWORK_GB_PER_SECOND = 25.0
ASSUMED_HOST_LINK_GB_PER_SECOND = 32.0
ASSUMED_MATRIX_EFFICIENCY = 0.75
"""Within the measured fractions of the peak: 0.51 (MI300X) to 0.87 (A100)."""
ASSUMED_ATTENTION_EFFICIENCY = 0.35
"""FlashAttention 2 on a device that it was not written for (H100, arXiv:2407.08608)."""

HOST_MEMORY_GB_PER_SECOND = 140.0
"""Host memory bandwidth of an offloaded optimizer, all ranks of a machine together. A step of
Llama-8B on eight H200 (stas00/ml-engineering, insights/when-to-upgrade-gpus) leaves about 2 s for
it: 120 GB/s. Ranks of one thread each (`OMP_NUM_THREADS=1`) reach a tenth.
"""
NVME_GB_PER_SECOND = 6.0
"""Read or write bandwidth of a machine's NVMe: one drive on PCIe 4.0 x4."""

MATRIX_SHARE = 0.82
"""Fraction of the best single matrix product's rate that the products of a block reach in sequence:
their shapes are not optimal, and a busy device clocks lower.
"""
GROUPED_SHARE = 0.80
"""Rate of grouped products over the rate of a block's other products."""
GROUPED_ROWS = 128
"""Rows of a tile of a grouped product (torch's grouped kernels and CUTLASS's on Hopper)."""
FP8_SHARE = 0.88
"""Fraction of the peak reached in fp8, divided by the fraction in bf16 (70.9 % and 80.3 % on H100,
stas00/ml-engineering).
"""
MEMORY_SHARE = 0.75
"""Fraction of the memory bandwidth reached by operations between matrix products."""
UNFUSED_SHARE = 0.60
"""Fraction that they reach as separate kernels, which read short rows and copy heads. The published
rows without fused kernels that are not kept back have no bias at this value.
"""
LINK_SHARE = 0.65
"""Fraction of a link's bandwidth that a collective of many megabytes reaches."""
NETWORK_SHARE = 0.60
"""Fraction of the network bandwidth that a collective between machines reaches."""
HOST_LINK_SHARE = 0.75
"""Fraction of the host link's bandwidth that a copy from pinned memory reaches."""
OVERLAP = 0.80
"""Fraction of a collective that overlaps with computation, if there is enough computation."""
COLLECTIVE_LATENCY = 20e-6
"""Minimum seconds of a collective for each doubling of its ranks."""

ORTHOGONALIZATION_STEPS = 5
"""Newton-Schulz steps of an update by Muon."""

BACKWARD_TO_FORWARD = 2.0
"""Backward over forward matrix products: the input's and the weight's gradient."""
ATTENTION_BACKWARD = 2.5
"""Backward over forward products of fused attention, which recomputes its scores: five to two
(arXiv:2205.14135).
"""
MERGED_BYTES, ADDED_BYTES = 18, 10
"""Bytes moved per element of the queries to merge the attention to one rank's keys in fp32, and to
add its gradient.
"""

# Kernel launches in the forward pass of a block.
KERNELS_OF_A_BLOCK = 60
KERNELS_OF_A_FUSED_BLOCK = 25
KERNELS_OF_EXPERTS = 40
"""Further launches of a sparse block: routing, sorting, grouped products, scattering."""
KERNEL_START = 5e-6
"""Seconds per kernel launch. A device faster than its launches waits for the processor."""
UPDATE_STARTS, FSDP2_STARTS = (5, 8, 8, 14), 5
"""Host time of the update per tensor, norm included, in kernel launches: by ZeRO stage, and with
FSDP2. Measured on a CPU (docs/planning.md).
"""

DISPATCH = 42e-6
"""Seconds per operation under `selective` in a user's module: each is looked at in Python. Fitted
to a run of Qwen3 0.6B on one H100, when models of transformers were looked at so too.
"""
WATCHED_CALL = 6e-6
"""Seconds per operation in models of transformers, where Python looks at calls alone."""
FORWARD_HOOK, BACKWARD_HOOK = 1.1e-3, 0.55e-3
"""Seconds of the host per module with parameters at ZeRO 3, in either pass: DeepSpeed's hooks look
up, gather and release the module's parameters. Fitted to a run of Qwen3 0.6B on one H100
(docs/planning.md); one CPU process, whose gathers start no kernels, took 170 and 120 µs.
"""
BLOCK_HOOKS = 0.35
"""Share of that time if each decoder block is gathered as a whole (docs/planning.md)."""

BACKWARD_TRAFFIC = 2.0
"""Backward over forward bytes moved by the operations between matrix products."""
LOGIT_BYTES = 40
"""Bytes moved per logit in both passes: cross entropy casts, normalises and differentiates."""
FUSED_LOGIT_BYTES = 12
"""Bytes moved per logit by a fused kernel that overwrites the logits with their gradient."""
OPTIMIZER_BYTES = 34
"""Bytes moved per parameter by an fp32 update: master, two moments, gradient, 16-bit weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Achievable rates of a device, per second."""

    products: float
    """FLOP/s of the matrix products in blocks."""
    wide_products: float
    """FLOP/s of products outside blocks and of eager attention, which fp8 leaves in 16 bits."""
    attention: float
    """FLOP/s of fused attention."""
    memory: float
    """Bytes/s of the operations between matrix products, if they are fused."""
    unfused: float
    """Bytes/s of these operations as separate kernels."""
    is_known: bool
    """Whether the hardware states its peak and its memory bandwidth."""


def device_rates(hardware: Hardware, precision: PrecisionConfig) -> Rates:
    """Return the achievable rates of a device in a number format; an A100's where unknown."""
    compute = precision_of(precision)
    peak = hardware.peak_tflops(compute.format)
    is_known = peak is not None and hardware.memory_bandwidth_gb_per_second is not None
    flops = (peak or ASSUMED_PEAK_TFLOPS) * TERA
    bandwidth = hardware.memory_bandwidth_gb_per_second or ASSUMED_MEMORY_GB_PER_SECOND
    share = hardware.matrix_efficiency or ASSUMED_MATRIX_EFFICIENCY
    attention = hardware.attention_efficiency or ASSUMED_ATTENTION_EFFICIENCY
    reached = share * MATRIX_SHARE
    products = flops * reached
    if compute.product_bytes is not None and not is_emulated(precision):
        narrow = hardware.peak_tflops(compute.name)
        products = (narrow * TERA if narrow else flops) * reached * FP8_SHARE
    return Rates(
        products=products,
        wide_products=flops * reached,
        attention=flops * attention,
        memory=bandwidth * GIGA * MEMORY_SHARE,
        unfused=bandwidth * GIGA * UNFUSED_SHARE,
        is_known=is_known,
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

    Rank order is tensor fastest, then sequence, context, data and pipeline (`Mesh`), and machines
    are filled in this order. A ring over several machines enters and leaves each one through the
    network cards of all its members there, so the members on a machine share the traffic. ZeRO
    partitions over the group `zero`, the data, context and sequence ranks or with HSDP a shard
    group of them, and experts over `expert_replicas`. The group `copies` is the ranks with the same
    HSDP shard, `stage` all ranks of a pipeline stage, and `pipeline` a chain of neighbouring
    stages.

    Args:
        shard_ranks: Size of an HSDP shard group; by default all replicas are one.
    """

    def __init__(self, hardware: Hardware, mesh: Mesh, shard_ranks: int | None = None) -> None:
        share = LINK_SHARE * GIGA
        link = hardware.device_link_gb_per_second or ASSUMED_LINK_GB_PER_SECOND
        network = hardware.network_gb_per_second or ASSUMED_NETWORK_GB_PER_SECOND
        host = hardware.host_link_gb_per_second or ASSUMED_HOST_LINK_GB_PER_SECOND
        self._link = link * share
        self._network = network * NETWORK_SHARE * GIGA
        self._host = host * HOST_LINK_SHARE * GIGA
        self._node = hardware.devices_per_node
        self._nodes = hardware.nodes
        inner = mesh.tensor * mesh.sequence_parts
        # Expert ranks are neighbours in the data axis; replicas of an expert lie that far apart.
        apart = mesh.tensor * mesh.expert
        self.tensor = self._group(mesh.tensor, 1)
        self.sequence = self._group(mesh.sequence, mesh.tensor)
        self.context = self._group(mesh.context, mesh.tensor * mesh.sequence)
        replicas = mesh.replicas
        shard_ranks = shard_ranks or replicas
        self.zero = self._group(shard_ranks, mesh.tensor)
        self.copies = self._group(replicas // shard_ranks, mesh.tensor * shard_ranks)
        self.expert = self._group(mesh.expert_ranks, 1)
        self.expert_replicas = self._group(mesh.expert_replicas, apart)
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

    def pass_on(self, size: float, group: RankGroup) -> float:
        """Return the seconds in which each rank sends `size` bytes to the next one in a ring.

        Between machines a message takes the network card of its sender, and the others wait for it.
        """
        is_inside = group.on_a_machine == group.ranks
        return size / (self._link if is_inside else self._network) + COLLECTIVE_LATENCY

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
        members = max(1, min(ranks, self._node // stride))
        if members >= ranks:
            return RankGroup(ranks, self._link, ranks)
        return RankGroup(ranks, min(self._link, members * self._network), members)

    def _latency(self, group: RankGroup) -> float:
        return COLLECTIVE_LATENCY * ceil(log2(group.ranks))


BALANCED_BY_BIAS, BALANCED_BY_LOSS = 1.04, 1.62
"""Load of the busiest expert over the mean, under a bias that is moved and under a balancing loss:
the means of two sizes of model (`MaxVio`, arXiv:2408.15664, table 2). What nothing balances is
taken for balanced by a loss, which flatters it.
"""

# Elements moved per routed row and width, counted in the operations of transformers'
# `grouped_mm_experts_forward` and of train/parallel/experts.py: rows are gathered, weighted,
# scattered and summed, with an expert axis before and after their exchange.
ROUTED_ELEMENTS, EXCHANGED_ELEMENTS = 7, 17
COMPILED_ELEMENTS = 4
"""Elements moved where a compiler fuses them: one pass before the products, one after."""


def sparse_share(model: ModelConfig) -> float:
    """Return the fraction of the blocks that have routed experts."""
    read = shapes.anatomy(model)
    return (
        0.0 if read is None else sum(block.experts > 0 for block in read.blocks) / len(read.blocks)
    )


def tensor_sums(model: ModelConfig, expert: int) -> float:
    """Return the all-reduces over tensor ranks in the forward pass of a block, a mean over the
    blocks: one after attention, the feed-forward layer, and shared experts beside the routed ones.
    With an expert axis the results of routed experts are gathered, which is half an all-reduce.
    """
    read = shapes.anatomy(model)
    if read is None:
        return 2.0
    shared = {p.block for p in read.parameters if p.role is Role.shared}
    gathered = sparse_share(model) if expert > 1 else 0.0
    return 2 + len(shared) / len(read.blocks) - gathered / 2


def expert_weights(model: ModelConfig) -> int:
    """Return the parameters of all routed experts of the model."""
    read = shapes.anatomy(model)
    return 0 if read is None else read.expert_parameters


def rank_load(config: RunConfig, ranks: int) -> float:
    """Return the tokens of the busiest of the `ranks` that share out experts over their mean.

    The load of the busiest expert is known. If the loads of experts are independent, the mean of n
    experts deviates less by the square root of n, and the largest deviation of N draws grows with
    the square root of log N.
    """
    experts = config.model.num_experts or 1
    if ranks == 1 or experts == 1:
        return 1.0
    settings = config.experts
    balanced = BALANCED_BY_BIAS if settings.bias_update_rate > 0 else BALANCED_BY_LOSS
    load = settings.expected_load or balanced
    return 1 + (load - 1) * sqrt(log(ranks) / log(experts) * ranks / experts)


def expert_time(
    config: RunConfig, speed: Rates, tokens: int, tensor: int, expert: int
) -> tuple[float, float]:
    """Return the seconds of a forward pass's grouped products, and of routing, on the busiest rank;
    averages over the blocks.

    `tokens` are a rank's own tokens of a micro-batch. `tensor` ranks share each expert; with an
    expert axis, both axes share out whole experts, and each tensor rank routes its part of the
    tokens. An expert's rows are multiplied in tiles of `GROUPED_ROWS`, of which the last is half
    empty on average.
    """
    model, share = config.model, sparse_share(config.model)
    read = shapes.anatomy(model)
    if read is None or not share:
        return 0.0, 0.0
    element = BYTES[precision_of(config.precision).format]
    multiplied, moved, weights = _expert_products(read)
    experts, top = model.num_experts or 1, model.experts_per_token or 1
    load = rank_load(config, expert * tensor if expert > 1 else 1)
    rows_per_expert = max(1.0, tokens * top * expert / experts)
    tiled = 1 + GROUPED_ROWS / 2 / rows_per_expert
    flops = 2 * tokens * load * multiplied / tensor
    streams = element * (tokens * load * moved + weights / expert) / tensor
    products = flops * tiled / (speed.products * GROUPED_SHARE) + streams / speed.memory
    elements = EXCHANGED_ELEMENTS if expert > 1 else ROUTED_ELEMENTS
    if config.kernels.is_compiled:
        elements = COMPILED_ELEMENTS
    rows = share * tokens * top * load / (tensor if expert > 1 else 1)
    return products, element * elements * rows * model.hidden_size / speed.memory


def exchanged_bytes(config: RunConfig, tokens: int, mesh: Mesh) -> float:
    """Return the bytes that one sparse block sends to experts, or back, for the busiest rank.
    Tensor ranks have the same `tokens`, and each sends its part.
    """
    rows = tokens / mesh.tensor * (config.model.experts_per_token or 1)
    rows *= rank_load(config, mesh.expert_ranks)
    return rows * config.model.hidden_size * BYTES[precision_of(config.precision).format]


@lru_cache(maxsize=8)
def _expert_products(read: Anatomy) -> tuple[float, float, float]:
    """Return averages over the blocks: the weights of experts multiplied per token, the elements
    that these products read and write per token, and the weights of all experts.
    """
    matrices = [p for p in read.parameters if p.role is Role.expert and not p.is_bias]
    routed = {p.name: read.active_share(p) for p in matrices}
    count = len(read.blocks)
    return (
        sum(p.numel * routed[p.name] for p in matrices) / count,
        sum(sum(p.shape[-2:]) * p.shape[0] * routed[p.name] for p in matrices) / count,
        read.expert_parameters / count,
    )
