"""Compute time of a micro-batch: matrix products, attention, other operations, loss.

The constants are every number of the step-time model that is neither a fact of the hardware nor
derived. Facts of a device are keys of `hardware` (`conf/hardware/`). Fractions of peak rates, and
the host's memory bandwidth, are fitted to the 43 published measurements of
`tests/data/throughput.csv` marked `fit`; `tests/tuning/test_speed.py` tests against the others.
`docs/planning.md` states the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainctl.config.schema import (
    AttentionKind,
    CompileKind,
    CrossEntropyKind,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.memory.constants import BYTES
from trainctl.memory.partial import trained_stages
from trainctl.memory.stages import pipeline_stages
from trainctl.models.anatomy import Anatomy, Parameter, Role
from trainctl.options.activation_checkpointing import checkpointing_of
from trainctl.options.model import spec_of
from trainctl.options.objective import HIDDEN_STATES, objective_of
from trainctl.options.precision import is_emulated, precision_of
from trainctl.plans import shapes
from trainctl.plans.flops import attention_products
from trainctl.plans.trainable import is_partial

TERA = 1e12


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
    """Bytes/s of the operations between matrix products."""
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
        is_known=is_known,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedShare:
    """Trained fraction of a model."""

    weights: float = 1.0
    """Fraction of the weights that the optimizer updates."""
    blocks: float = 1.0
    """Fraction of the blocks that gradients reach."""


def trained_share(config: RunConfig) -> TrainedShare:
    """Return the trained fraction of a run's model.

    The time of an adapter's own products, and of expanding a base of 8 or 4 bits, is neglected.
    """
    if not is_partial(config):
        return TrainedShare()
    (stage,) = trained_stages(config, pipeline_stages(config.model))
    reached = sum(count for _, count in stage.learning or ())
    return TrainedShare(
        weights=stage.trained.parameters / max(stage.weights, 1),
        blocks=reached / max(stage.blocks, 1),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds per micro-batch in one block: forward plus backward pass (`both`), its recomputation
    (`again`), and the forward pass alone.
    """

    both: float
    again: float
    forward: float


def block_time(
    config: RunConfig, speed: Rates, tokens: int, sequence_length: int, tensor: int
) -> BlockTime:
    """Return the compute time of one block.

    `tokens` are the tokens of a micro-batch on this rank. `sequence_length` is the number of tokens
    that attend to each other. `tensor` is the number of ranks that share the block's matrices.
    """
    model, element = config.model, BYTES[precision_of(config.precision).format]
    products, moved, weights = _average_products(model)
    sharded = tokens * products / tensor
    # Each product reads its input and weights and writes its result.
    streams = element * (tokens * moved + weights) / tensor
    product_seconds = 2 * sharded / speed.products + streams / speed.memory
    attention, attention_backward = _attention_seconds(
        config, speed, tokens, sequence_length, tensor
    )
    traffic = tokens * _traffic_bytes(config, tensor) / speed.memory
    starts = KERNEL_START * (KERNELS_OF_A_FUSED_BLOCK if _is_fused(config) else KERNELS_OF_A_BLOCK)
    forward = max(product_seconds + attention + traffic, starts)
    train = trained_share(config)
    # Each product has a gradient of its input, and of its weight if trained.
    back = BACKWARD_TO_FORWARD * (1 + train.weights) / 2
    backward = max(
        (back + _share_in_tiles(config)) * product_seconds
        + attention_backward
        + BACKWARD_TRAFFIC * traffic,
        2 * starts,
    )
    keeps = checkpointing_of(config.activation_checkpointing).keeps_products
    return BlockTime(
        both=forward + train.blocks * backward,
        again=train.blocks * (traffic if keeps else forward),
        forward=forward,
    )


def _share_in_tiles(config: RunConfig) -> float:
    """Return the fraction of a block's products that tiling recomputes in the backward pass."""
    if config.kernels.mlp_tiles == 1:
        return 0.0
    inside = all_of = 0
    for tensor in shapes.all_tensors(config.model):
        if shapes.block_of(tensor.name) is not None and len(tensor.shape) > 1:
            all_of += tensor.numel
            in_layer = any(f".{name}." in tensor.name for name in shapes.FEED_FORWARD)
            inside += tensor.numel if in_layer else 0
    return inside / max(all_of, 1)


def _attention_seconds(
    config: RunConfig, speed: Rates, tokens: int, sequence_length: int, tensor: int
) -> tuple[float, float]:
    """Return the seconds of the scores and their weighted sum, forward and backward.

    Fused attention skips later positions. Eager attention computes all of them and moves the scores
    through memory: product, mask, fp32 softmax and cast (compiled, one fused kernel for the middle
    ones).
    """
    model = config.model
    products = attention_products(model, sequence_length) / max(model.num_layers, 1) / tensor
    if model.attention is AttentionKind.eager:
        score_bytes = 8 if _is_fused(config) else 22
        keys = min(sequence_length, shapes.attention_window(model) or sequence_length)
        moved = model.num_attention_heads / tensor * keys * score_bytes / speed.memory
        forward = tokens * (2 * products / speed.wide_products + moved)
        return forward, 2 * forward
    forward = tokens * products / speed.attention
    return forward, ATTENTION_BACKWARD * forward


def _traffic_bytes(config: RunConfig, tensor: int) -> float:
    """Return the bytes per token that a block's other operations move in a forward pass.

    For elements of two bytes, from the operations of transformers' modelling code: an RMSNorm reads
    and writes fp32 copies (36 bytes per element), a fused one reads and writes once (4); a
    residual addition takes 6; a rotation 16 or 4; SwiGLU 10 or 6; GELU in its tanh form 36 or 4.
    """
    model, spec = config.model, spec_of(config.model)
    hidden, ffn = float(model.hidden_size), _inner_width(model) / tensor
    if config.parallelism.sequence_sharded_norms:
        hidden /= tensor
    heads = (model.num_attention_heads + shapes.key_value_heads(model)) / tensor
    turned = heads * shapes.head_dim(model)
    fused = _is_fused(config)
    wide = BYTES[precision_of(config.precision).format] / 2
    norm = spec.norm.moved_fused if fused else spec.norm.moved
    rotation = (4 if fused else 16) if spec.is_rotary else 0
    inner = spec.activation.moved_fused if fused else spec.activation.moved
    return wide * ((2 * norm + 2 * 6) * hidden + rotation * turned + inner * ffn)


def head_time(config: RunConfig, speed: Rates, tokens: int, tensor: int) -> float:
    """Return the seconds per micro-batch in the output projection and the loss, both passes."""
    model, kind = config.model, config.kernels.cross_entropy
    if objective_of(config.objective).reads == HIDDEN_STATES:
        return 0.0
    logits = tokens * (model.score_outputs or model.vocab_size / tensor)
    product = 2 * logits * model.hidden_size / speed.wide_products
    passes = 3.0 if kind is CrossEntropyKind.plain else 4.0  # the loss recomputes its chunks
    per_logit = LOGIT_BYTES
    if kind is CrossEntropyKind.liger_fused:
        passes, per_logit = 3.0, FUSED_LOGIT_BYTES
    return passes * product + logits * per_logit / speed.memory


def stage_parameters(
    model: ModelConfig, blocks: int, tensor: int, has_embedding: bool, has_head: bool
) -> float:
    """Return the approximate parameters of a rank of a pipeline stage: tensor ranks are assumed to
    share all of them.
    """
    _, _, weights = _average_products(model)
    vocabulary = model.vocab_size * model.hidden_size
    alone = model.score_outputs is not None or (has_embedding and model.tie_word_embeddings)
    ends = vocabulary * (has_embedding + (has_head and not alone))
    return (blocks * weights + ends) / tensor


def block_matrices(model: ModelConfig) -> tuple[float, float, float]:
    """Return averages over the blocks: the number of matrices, their rows and columns, and the
    FLOPs that orthogonalise them.

    Each of the steps of Newton-Schulz is three products: of an m x n matrix (m <= n) with its
    transpose, of the result with itself, and of that with the matrix (train/optimizers/muon.py).
    """
    read = shapes.anatomy(model)
    if read is None:
        inside = [tensor.shape for tensor in shapes.block_tensors(model) if tensor.is_matrix]
        blocks = 1
    else:
        inside = [p.shape for p in read.parameters if p.block is not None and len(p.shape) > 1]
        blocks = len(read.blocks)
    sorted_sides = [sorted(shape) for shape in inside if len(shape) == 2]  # no stacked experts
    products = sum(2 * m * m * (2 * n + m) for m, n in sorted_sides)
    return (
        len(inside) / blocks,
        sum(map(sum, inside)) / blocks,
        ORTHOGONALIZATION_STEPS * products / blocks,
    )


def _is_fused(config: RunConfig) -> bool:
    """Return True if the operations between matrix products are fused into few kernels."""
    return config.kernels.liger or config.kernels.compile is not CompileKind.none


def _average_products(model: ModelConfig) -> tuple[float, float, float]:
    """Return averages over the blocks: the weights multiplied per token, the elements that these
    products read and write per token, and all weights, including experts that the token is not
    routed to.
    """
    read = shapes.anatomy(model)
    if read is None:
        products, moved = _block_products(*_product_shape(model))
        return products, moved, products
    return _products_from_anatomy(read)


@lru_cache(maxsize=8)
def _products_from_anatomy(read: Anatomy) -> tuple[float, float, float]:
    matrices = [p for p in read.parameters if p.block is not None and len(p.shape) > 1]
    moved = sum(sum(p.shape[-2:]) * max(1.0, _routed_experts(read, p)) for p in matrices)
    count = len(read.blocks)
    inside = sum(p.numel for p in read.parameters if p.block is not None)
    return (read.multiplied - read.head) / count, moved / count, inside / count


def _routed_experts(read: Anatomy, parameter: Parameter) -> float:
    """Return the number of experts in a tensor that a token is routed to; 1 for other tensors."""
    return read.active_share(parameter) * parameter.shape[0] if len(parameter.shape) > 2 else 1.0


def _inner_width(model: ModelConfig) -> float:
    """Return the width of the feed-forward layer; with experts, the summed width of the routed and
    the shared experts, averaged over the blocks.

    A gated layer has three matrices of this width.
    """
    read = shapes.anatomy(model)
    if read is None or not read.has_experts:
        return model.intermediate_size
    dense = sum(not block.experts for block in read.blocks)
    sparse = read.numel(Role.shared) + sum(
        p.numel * read.active_share(p) for p in read.parameters if p.role is Role.expert
    )
    whole = dense * model.intermediate_size + sparse / (3 * model.hidden_size)
    return whole / len(read.blocks)


def _product_shape(model: ModelConfig) -> tuple[int, int, int, int, int, int]:
    return (
        spec_of(model).feed_forward.matrices,
        model.hidden_size,
        model.intermediate_size,
        model.num_attention_heads,
        shapes.key_value_heads(model),
        shapes.head_dim(model),
    )


@lru_cache(maxsize=64)
def _block_products(
    up: int, hidden: int, ffn: int, heads: int, key_heads: int, width: int
) -> tuple[int, int]:
    """Return the weights of a block's products, and the elements read and written per token."""
    queries, keys = heads * width, key_heads * width
    matrices = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    matrices += [(hidden, ffn)] * up + [(ffn, hidden)]
    return sum(a * b for a, b in matrices), sum(a + b for a, b in matrices)


GIGA = 1e9

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
FP8_SHARE = 0.88
"""Fraction of the peak reached in fp8, divided by the fraction in bf16 (70.9 % and 80.3 % on H100,
stas00/ml-engineering).
"""
MEMORY_SHARE = 0.75
"""Fraction of the memory bandwidth reached by operations between matrix products."""
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

# Kernel launches in the forward pass of a block.
KERNELS_OF_A_BLOCK = 60
KERNELS_OF_A_FUSED_BLOCK = 25
KERNEL_START = 5e-6
"""Seconds per kernel launch. A device faster than its launches waits for the processor."""

BACKWARD_TRAFFIC = 2.0
"""Backward over forward bytes moved by the operations between matrix products."""
LOGIT_BYTES = 40
"""Bytes moved per logit in both passes: cross entropy casts, normalises and differentiates."""
FUSED_LOGIT_BYTES = 12
"""Bytes moved per logit by a fused kernel that overwrites the logits with their gradient."""
OPTIMIZER_BYTES = 34
"""Bytes moved per parameter by an fp32 update: master, two moments, gradient, 16-bit weight."""
