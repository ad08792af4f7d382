"""What a block keeps for its backward pass: bytes per token, operation by operation.

Derived from the operations of transformers' modelling code, and compared by a test with a trace of
a real block (`torch.autograd.graph.saved_tensors_hooks`, one count per storage). In the formulas
below ``e`` is the element size of the compute type; all sizes are those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    ModelConfig,
)
from trainctl.memory.constants import BYTES
from trainctl.memory.trainable import Learning, everything
from trainctl.options.activation_checkpointing import Recomputing, checkpointing_of, recomputed
from trainctl.options.model import Norm, spec_of
from trainctl.options.precision import precision_of
from trainctl.plan import shapes
from trainctl.plan.types import Sketch

FP32 = 4
SCORE_GRADIENT_COPIES = 2
"""Gradients of attention scores alive at once when attention is eager, in the softmax's format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Bytes per token and rank of one block."""

    norms: int
    """Inputs and outputs of its norms (copied to each tensor-parallel rank)."""
    attention: int
    """Queries, keys, values, output and statistics."""
    scores: int
    """Attention probabilities; 0 unless attention is eager."""
    feed_forward: int
    """Inside the feed-forward layer."""
    boundary: int
    """The block's input, which is kept when the block is recomputed."""
    products: int
    """Results of products with weights and of attention as one kernel, which `selective` keeps
    besides it."""
    feed_forward_gradient: int
    """Gradients alive while the feed-forward layer goes backward."""
    attention_gradient: int
    """Gradients alive while attention goes backward."""

    @property
    def saved(self) -> int:
        """Bytes per token kept from forward to backward."""
        return self.norms + self.attention + self.scores + self.feed_forward

    def backward_extra(self, kept: int) -> int:
        """Most that a backward pass needs beyond `kept`: the feed-forward layer goes first, and
        what it kept is gone when attention follows."""
        return max(
            self.feed_forward_gradient,
            self.attention_gradient + self.saved - kept - self.feed_forward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Bytes of one rank of a stage."""

    forward_end: int
    """Kept when the last micro batch in flight has gone forward."""
    block_backward: int
    """Added while one block goes backward: what it recomputes, and gradients."""
    last_block: int
    """All that is there while the first block, the last to go backward, does so."""
    offloaded: int
    """Block inputs kept in host memory instead."""


def block_activations(
    model: ModelConfig,
    *,
    sequence_length: int,
    element: int,
    tensor: int = 1,
    autocast: bool = False,
    liger: bool = False,
    learning: Learning | None = None,
) -> BlockActivations:
    """Activations of one block.

    Args:
        sequence_length: Tokens of a whole sequence; eager scores grow with it.
        element: Bytes of the compute type.
        tensor: Tensor-parallel ranks, which share heads and feed-forward width. Ulysses ranks
            share tokens outside attention and heads inside: bytes per token stay the same.
        autocast: Whether weights and residual stream are fp32.
        liger: Whether Liger's norms and SwiGLU take the place of transformers'.
        learning: What of it learns; none is everything.
    """
    spec = spec_of(model)
    learning = learning or everything(spec)
    hidden, up = model.hidden_size, spec.feed_forward
    width = shapes.head_dim(model)
    heads = model.num_attention_heads / tensor
    key_heads = shapes.key_value_heads(model) / tensor
    ffn = model.intermediate_size / tensor
    residual = FP32 if autocast else element
    eager = model.attention is AttentionKind.eager

    scores = 0.0
    softmax = FP32 if autocast or spec.softmax_in_fp32 else element
    if eager:
        # Where softmax runs in fp32, as autocast has it, the result is cast for the product.
        fp32_copy = FP32 if element < softmax else 0
        scores = heads * sequence_length * (element + fp32_copy)
    if eager or _expands_keys(model, sequence_length):
        key_heads = heads
    # One result for each projection, and attention's; the last two have the block's full width.
    attended = 0.0 if eager else heads * width * element + FP32 * heads
    own_keys = shapes.key_value_heads(model) / tensor
    projected = width * (heads + 2 * own_keys) + up.matrices * ffn + 2 * hidden
    products = element * projected + attended
    query_norms = 0.0
    for name, count in zip(spec.attention.per_head, (heads, own_keys), strict=False):
        learns = learning.norm(f"{spec.attention.module}.{name}")
        query_norms += count * _norm_bytes(spec.norm, width, element, liger, learns)
    qkvo = element * width * (2 * heads + 2 * key_heads)
    statistics = 0.0 if eager else FP32 * heads
    # Two norms, and what each hands to the products; autocast casts it once for each of them.
    first, *others = (name for name in spec.block if isinstance(name, str))
    norms = sum(
        _norm_bytes(spec.norm, hidden, residual, liger, learning.norm(name)) for name in others
    )
    if not learning.begins:
        norms += _norm_bytes(spec.norm, hidden, residual, liger, learning.norm(first))
    elif learning.norm(first):
        norms += hidden * residual  # what meets its weight, or the input
    readers = [learning.readers(region) for region in (spec.attention, up)]
    norms += hidden * element * sum(count if autocast else min(count, 1) for count in readers)
    inner = ffn * element * (spec.activation.kept_by_liger if liger else spec.activation.kept)
    # What enters the last product of a region: attention as one kernel keeps its result anyway.
    kept = qkvo
    if eager and not learning.reads(f"{spec.attention.module}.{spec.attention.row}"):
        kept -= element * width * heads
    if not learning.reads(f"{up.module}.{up.row}"):
        inner -= element * ffn
    separate = (heads, own_keys, own_keys)
    counts = separate if spec.attention.fused == 1 else (sum(separate),)
    outputs = {
        f"{spec.attention.module}.{name}": width * count
        for name, count in zip(spec.attention.columns, counts, strict=True)
    } | {f"{up.module}.{name}": ffn for name in up.columns}
    added = {
        region: sum(
            _adapter_bytes(
                rank,
                hidden if name in outputs else length,
                outputs.get(name, hidden),
                element,
                learning,
            )
            for name, rank in learning.adapters(region)
        )
        for region, length in ((spec.attention, heads * width), (up, ffn))
    }
    return BlockActivations(
        norms=round(norms),
        attention=round(kept + query_norms + statistics + added[spec.attention]),
        scores=round(scores),
        feed_forward=round(inner + added[up]),
        boundary=round(hidden * residual),
        products=round(products),
        feed_forward_gradient=round(2 * ffn * element + hidden * (element + residual)),
        attention_gradient=round(
            qkvo
            + hidden * (element + residual)
            + (SCORE_GRADIENT_COPIES * softmax * heads * sequence_length if eager else 0)
        ),
    )


def in_tiles(block: BlockActivations, tiles: int, *, beside: int) -> BlockActivations:
    """Return a block whose feed-forward layer goes in tiles, each computed again in its turn.

    Args:
        block: As it is in one piece.
        tiles: Number of tiles.
        beside: Bytes per token of the gradients to the layer's output and of its input, which are
            there for all tokens.
    """
    if tiles == 1:
        return block
    inside = block.feed_forward + max(block.feed_forward_gradient - beside, 0)
    return replace(block, feed_forward=0, feed_forward_gradient=round(inside / tiles) + beside)


def stage_activations(
    plan: Sketch,
    *,
    blocks: int,
    in_flight: int,
    element: int,
    autocast: bool,
    traced: BlockActivations | None = None,
    learning: Sequence[tuple[Learning, int]] | None = None,
) -> StageActivations:
    """Activations of the blocks of a pipeline stage.

    Args:
        blocks: Blocks of the stage.
        in_flight: Micro batches whose activations are alive at once (1F1B: the distance to the
            last stage, and no more than there are).
        element: Bytes of the compute type.
        autocast: Whether weights and residual stream are fp32.
        traced: One of the blocks on this rank, where the model was traced.
        learning: What learns in the blocks that gradients reach, and in how many; none is all of
            each. Others keep nothing.
    """
    closed = partial(
        block_activations,
        plan.config.model,
        sequence_length=plan.batch.sequence_length,
        element=element,
        tensor=plan.mesh.tensor,
        autocast=autocast,
        liger=plan.config.kernels.liger,
    )
    whole = traced or closed()
    kinds = [(whole, blocks)]
    if learning is not None:
        kinds = [(closed(learning=each), count) for each, count in learning]
        if traced is not None:
            kinds = [
                (in_proportion(traced, whole=closed(), part=block), count) for block, count in kinds
            ]
    beside = plan.config.model.hidden_size * (element + (FP32 if autocast else element))
    tiles = plan.config.kernels.mlp_tiles
    parts = [
        _of_blocks(plan, in_tiles(block, tiles, beside=beside), count, in_flight)
        for block, count in kinds
    ]
    return StageActivations(
        forward_end=sum(part.forward_end for part in parts),
        block_backward=max((part.block_backward for part in parts), default=0),
        last_block=max((part.last_block for part in parts), default=0),
        offloaded=sum(part.offloaded for part in parts),
    )


def in_proportion(
    block: BlockActivations, *, whole: BlockActivations, part: BlockActivations
) -> BlockActivations:
    """Return a traced block of which less is kept than the trace had: each part shrinks as its
    closed form does.

    Args:
        whole: The closed form of that.
        part: The closed form of what is asked for: a tensor rank's share, or a block that is frozen
            in part.
    """
    shares = {}
    for item in fields(BlockActivations):
        before, after = getattr(whole, item.name), getattr(part, item.name)
        share = after / before if before else 1.0
        shares[item.name] = round(getattr(block, item.name) * share)
    return BlockActivations(**shares)


def _of_blocks(
    plan: Sketch, block: BlockActivations, blocks: int, in_flight: int
) -> StageActivations:
    """Activations of so many blocks alike."""
    settings, tokens = recomputed(plan.config), tokens_per_rank(plan)
    if settings is None:
        backward = block.backward_extra(block.saved)
        return StageActivations(
            forward_end=tokens * block.saved * blocks * in_flight,
            block_backward=tokens * backward,
            last_block=tokens * (block.saved + backward) if blocks else 0,
            offloaded=0,
        )
    # The most that a stage may have of them, wherever in the model it begins.
    checkpointed = -(-blocks // settings.every_kth_block)
    boundary = _boundary(block, settings, plan.mesh.tensor)
    offloads = settings.offload_to_cpu and plan.hardware.accelerator is not Accelerator.cpu
    on_device = 1 if offloads else checkpointed * in_flight
    whole = (blocks - checkpointed) * block.saved * in_flight
    # What is kept besides the input is given back, and not computed beside it again.
    kept = block.products if checkpointing_of(settings).keeps_products else 0
    again = max(block.saved - kept, 0)
    backward = again + block.backward_extra(block.saved)
    return StageActivations(
        forward_end=tokens
        * (
            boundary * min(on_device, checkpointed * in_flight)
            + kept * checkpointed * in_flight
            + whole
        ),
        block_backward=tokens * backward,
        last_block=tokens * (boundary + kept + backward) if blocks else 0,
        offloaded=tokens * boundary * checkpointed * in_flight if offloads else 0,
    )


def tokens_per_rank(plan: Sketch) -> int:
    """Tokens of a micro batch on one rank: Ulysses ranks share each sequence."""
    share = -(-plan.batch.sequence_length // plan.mesh.sequence)
    return plan.batch.micro_batch_size * share


def compute_bytes(plan: Sketch) -> int:
    """Return bytes of an activation's element."""
    return BYTES[precision_of(plan.config.precision).format]


def _boundary(block: BlockActivations, settings: Recomputing, tensor: int) -> int:
    return block.boundary // (tensor if settings.partition_across_tensor_ranks else 1)


def _adapter_bytes(
    rank: int, inputs: float, outputs: float, element: int, learning: Learning
) -> float:
    """Return bytes per token that an adapter keeps besides its input: the low product; with dropout
    a copy of the input and a mask; with magnitudes what they scale
    (`trainctl.train.adapters.layers`)."""
    size = float(element * rank)
    if learning.dropout:
        size += inputs * (element + 1)
    if learning.magnitudes:
        # With dropout the outputs of layer and adapter are scaled by different numbers.
        size += outputs * element * (2 if learning.dropout else 1)
    return size


def _norm_bytes(norm: Norm, width: int, element: int, liger: bool, learns: bool) -> int:
    """Return bytes that a norm keeps per token besides its output: its statistics and its input,
    which some keep in fp32 (its own storage if it is fp32 already) beside the scaled values in the
    input's type, which meet the weight, if that learns. Liger's keeps the input as it came
    (ops/rms_norm.py of liger-kernel)."""
    copies = norm.copies_in_fp32 and not liger
    scaled = element if learns else 0
    return width * (FP32 + scaled if copies else element) + FP32 * norm.statistics


def _expands_keys(model: ModelConfig, sequence_length: int) -> bool:
    """Whether a mask makes transformers repeat keys and values for every query head."""
    spec = spec_of(model)
    window = model.sliding_window if spec.has_window and not spec.is_directory else None
    return model.attention is AttentionKind.sdpa and window is not None and window < sequence_length
