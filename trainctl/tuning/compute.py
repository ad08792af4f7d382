"""Compute time of a micro-batch: matrix products, attention, other operations, loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from trainctl.config.schema import (
    AttentionKind,
    CrossEntropyKind,
    ModelConfig,
    RunConfig,
)
from trainctl.memory.constants import BYTES
from trainctl.memory.partial import trained_stages
from trainctl.memory.stages import pipeline_stages
from trainctl.models.anatomy import Anatomy, Role
from trainctl.options.activation_checkpointing import checkpointing_of
from trainctl.options.engine import engine_of
from trainctl.options.model import spec_of
from trainctl.options.objective import HIDDEN_STATES, objective_of
from trainctl.options.precision import precision_of
from trainctl.plans import shapes
from trainctl.plans.flops import attention_products
from trainctl.plans.gathering import gathers_blocks
from trainctl.plans.trainable import is_partial
from trainctl.tuning.rates import (
    ADDED_BYTES,
    ATTENTION_BACKWARD,
    BACKWARD_HOOK,
    BACKWARD_TO_FORWARD,
    BACKWARD_TRAFFIC,
    BLOCK_HOOKS,
    DISPATCH,
    FORWARD_HOOK,
    FUSED_LOGIT_BYTES,
    KERNEL_START,
    KERNELS_OF_A_BLOCK,
    KERNELS_OF_A_FUSED_BLOCK,
    KERNELS_OF_EXPERTS,
    LOGIT_BYTES,
    MERGED_BYTES,
    ORTHOGONALIZATION_STEPS,
    WATCHED_CALL,
    Rates,
    expert_time,
    expert_weights,
    sparse_share,
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


def updated_tensors(config: RunConfig) -> int:
    """Return the number of tensors that the optimizer updates; the few outside blocks may miss."""
    model = config.model
    if is_partial(config):
        return trained_stages(config, pipeline_stages(model))[0].trained.tensors
    read = shapes.anatomy(model)
    if read is None:
        return model.num_layers * len(shapes.block_tensors(model))
    return len(read.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTime:
    """Seconds per micro-batch in one block: forward plus backward pass (`both`), its recomputation
    (`again`), and the forward pass alone.
    """

    both: float
    again: float
    forward: float


def block_time(
    config: RunConfig, speed: Rates, tokens: int, sequence_length: int, tensor: int, expert: int = 1
) -> BlockTime:
    """Return the compute time of one block, averaged over dense and sparse blocks.

    `tokens` are the tokens of a micro-batch on this rank. `sequence_length` is the number of tokens
    that attend to each other. `tensor` is the number of ranks that share the block's matrices, and
    `expert` the number that share its experts.
    """
    model, element = config.model, BYTES[precision_of(config.precision).format]
    products, moved, weights = _average_products(model)
    sharded = tokens * products / tensor
    # Each product reads its input and weights and writes its result.
    streams = element * (tokens * moved + weights) / tensor
    product_seconds = 2 * sharded / speed.products + streams / speed.memory
    routed_products, routing = expert_time(config, speed, tokens, tensor, expert)
    product_seconds += routed_products
    attention, attention_backward = attention_seconds(
        config, speed, tokens, sequence_length, tensor
    )
    bandwidth = speed.memory if _is_fused(config) else speed.unfused
    traffic = tokens * _traffic_bytes(config, tensor) / bandwidth + routing
    train = trained_share(config)
    # Each product has a gradient of its input, and of its weight if trained.
    back = BACKWARD_TO_FORWARD * (1 + train.weights) / 2
    forward = product_seconds + attention + traffic
    backward = (
        (back + _share_in_tiles(config)) * product_seconds
        + attention_backward
        + BACKWARD_TRAFFIC * traffic
    )
    keeps = checkpointing_of(config.activation_checkpointing).keeps_products
    again = traffic if keeps else forward
    starts, hooks = _host_seconds(config)
    on_host = starts + hooks * FORWARD_HOOK, 2 * starts + hooks * BACKWARD_HOOK
    alone = max(forward, on_host[0])
    both = alone + train.blocks * max(backward, on_host[1])
    # The host runs ahead of the device, so that it is late only if its whole work takes longer.
    whole = max(
        forward + train.blocks * (backward + again),
        on_host[0] + train.blocks * (on_host[1] + on_host[0]),
    )
    return BlockTime(both=both, again=max(0.0, whole - both), forward=alone)


def _host_seconds(config: RunConfig) -> tuple[float, float]:
    """Return the seconds in which the host starts the kernels of a block's forward pass, and the
    number of its modules that DeepSpeed's hooks gather and release at stage 3, or their equivalent.
    """
    model = config.model
    dense = KERNELS_OF_A_FUSED_BLOCK if _is_fused(config) else KERNELS_OF_A_BLOCK
    kernels = dense + sparse_share(model) * KERNELS_OF_EXPERTS
    each = KERNEL_START
    keeps = checkpointing_of(config.activation_checkpointing).keeps_products
    if keeps and not config.kernels.is_compiled:
        each += DISPATCH if model.is_module else WATCHED_CALL
    is_hooked = config.zero_stage.stage == 3 and engine_of(config).takes_json
    hooks = _modules_of_a_block(model) * (BLOCK_HOOKS if gathers_blocks(config) else 1)
    return kernels * each, hooks if is_hooked else 0


def _modules_of_a_block(model: ModelConfig) -> int:
    """Return the number of modules of a block that have parameters of their own."""
    read = shapes.anatomy(model)
    if read is None:
        names = [tensor.name for tensor in shapes.block_tensors(model)]
        return len({name.rpartition(".")[0] for name in names})
    names = [p.name for p in read.parameters if p.block is not None]
    return round(len({name.rpartition(".")[0] for name in names}) / max(len(read.blocks), 1))


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


def attention_seconds(
    config: RunConfig, speed: Rates, tokens: int, sequence_length: int, tensor: int
) -> tuple[float, float]:
    """Return the seconds of the scores and their weighted sum, forward and backward.

    Fused attention skips later positions. Eager attention computes all of them and moves the scores
    through memory: product, mask, fp32 softmax and cast (compiled, one fused kernel for the middle
    ones).
    """
    model = config.model
    blocks = model.num_layers + (model.future_blocks or 0)
    products = attention_products(model, sequence_length) / max(blocks, 1) / tensor
    if model.attention is AttentionKind.eager:
        score_bytes = 8 if _is_fused(config) else 22
        keys = min(sequence_length, shapes.attention_window(model) or sequence_length)
        moved = model.num_attention_heads / tensor * keys * score_bytes / speed.memory
        forward = tokens * (2 * products / speed.wide_products + moved)
        return forward, 2 * forward
    merged, context = 0.0, config.parallelism.context
    if context > 1:
        width = model.num_attention_heads / tensor * shapes.head_dim(model)
        merged = tokens * width * context / speed.memory
    forward = tokens * products / speed.attention
    return forward + MERGED_BYTES * merged, ATTENTION_BACKWARD * forward + ADDED_BYTES * merged


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
    heads = (model.num_attention_heads / tensor, shapes.own_key_value_heads(model, tensor))
    turned = sum(heads) * shapes.head_dim(model)
    # Of queries and keys.
    normed = sum(heads[: len(spec.attention.per_head)]) * shapes.head_dim(model)
    fused = _is_fused(config)
    wide = BYTES[precision_of(config.precision).format] / 2
    norm = spec.norm.moved_fused if fused else spec.norm.moved
    rotation = (4 if fused else 16) if spec.is_rotary else 0
    inner = spec.activation.moved_fused if fused else spec.activation.moved
    return wide * (norm * (2 * hidden + normed) + 12 * hidden + rotation * turned + inner * ffn)


def head_time(config: RunConfig, speed: Rates, tokens: int, tensor: int) -> float:
    """Return the seconds per micro-batch in the output projection and the loss, both passes, for
    the next and further tokens; and in the projections before the blocks of further tokens.
    """
    model, kind = config.model, config.kernels.cross_entropy
    if objective_of(config.objective).reads == HIDDEN_STATES:
        return 0.0
    heads = 1 + (model.future_blocks or 0)
    logits = heads * tokens * (model.score_outputs or model.vocab_size / tensor)
    product = 2 * logits * model.hidden_size / speed.wide_products
    passes = 3.0 if config.kernels.has_all_logits else 4.0  # the loss recomputes its chunks
    per_logit = LOGIT_BYTES
    if kind is CrossEntropyKind.liger_fused:
        passes, per_logit = 3.0, FUSED_LOGIT_BYTES
    joined = (1 + BACKWARD_TO_FORWARD) * 2 * tokens * _joining_weights(model) / speed.products
    return passes * product + logits * per_logit / speed.memory + joined


def _joining_weights(model: ModelConfig) -> int:
    """Return the elements of the projections of hidden states and embeddings that each block of
    further tokens begins with (`MtpLayer`).
    """
    return (model.future_blocks or 0) * 2 * model.hidden_size**2


def stage_parameters(
    model: ModelConfig, blocks: int, tensor: int, has_embedding: bool, has_head: bool
) -> float:
    """Return the approximate parameters of a rank of a pipeline stage that holds all experts:
    tensor ranks are assumed to share all of them.
    """
    _, _, weights = _average_products(model)
    weights += expert_weights(model) / max(model.num_layers, 1)
    vocabulary = model.vocab_size * model.hidden_size
    alone = model.score_outputs is not None or (has_embedding and model.tie_word_embeddings)
    ends = vocabulary * (has_embedding + (has_head and not alone))
    ends += has_head * _joining_weights(model)
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
    return bool(config.kernels.liger) or config.kernels.is_compiled


def _average_products(model: ModelConfig) -> tuple[float, float, float]:
    """Return averages over the blocks, without routed experts: the weights multiplied per token,
    the elements that these products read and write per token, and all weights.
    """
    read = shapes.anatomy(model)
    if read is None:
        products, moved = _block_products(*_product_shape(model))
        return products, moved, products
    return _products_from_anatomy(read)


@lru_cache(maxsize=8)
def _products_from_anatomy(read: Anatomy) -> tuple[float, float, float]:
    dense = [p for p in read.parameters if p.block is not None and p.role is not Role.expert]
    matrices = [p for p in dense if len(p.shape) > 1 and not p.is_bias]
    count = len(read.blocks)
    return (
        sum(p.numel for p in matrices) / count,
        sum(sum(p.shape[-2:]) for p in matrices) / count,
        sum(p.numel for p in dense) / count,
    )


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
