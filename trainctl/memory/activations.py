"""Activation memory of one block: bytes per token kept for the backward pass, per operation.

The formulas follow the operations of transformers' modelling code. A test compares them with a
trace of a real block (`torch.autograd.graph.saved_tensors_hooks`, each storage counted once).
``e`` is the element size of the compute type. All sizes are per rank.

A matrix product keeps its input only for the gradient of its weight; the gradient of the input
needs only the weight. So a frozen linear layer keeps nothing, and a frozen layer with an adapter
keeps what the adapter's two products need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from trainctl.config.schema import Accelerator, AttentionKind, ModelConfig
from trainctl.memory.constants import BYTES, FP32
from trainctl.options.activation_checkpointing import (
    Recomputing,
    checkpointing_of,
    recomputing_section,
)
from trainctl.options.model import Family, Norm, Region, spec_of
from trainctl.options.precision import precision_of
from trainctl.plans import shapes
from trainctl.plans.settings import uses_ring
from trainctl.plans.types import LayoutPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainableBlock:
    """Trained parts of a block, which decide how much is kept for the backward pass."""

    weights: frozenset[str]
    """Names of the block's own trained parameters, relative to the block."""
    ranks: tuple[tuple[str, int], ...] = ()
    """Linear layers of the block that have an adapter, each with the adapter's rank."""
    dropout: bool = False
    """Whether dropout is applied to the adapters' input, which is then a separate copy."""
    magnitudes: bool = False
    """Whether layer plus adapter outputs are scaled by a trained vector (DoRA), and so kept."""
    begins: bool = False
    """Whether nothing before the block is trained, so that the block's input has no gradient."""
    keeps_inputs: bool = False
    """Whether linear layers always keep their inputs, as DeepSpeed's does at ZeRO 3
    (`LinearFunctionForZeroStage3`, zero/linear.py).
    """

    def norm(self, name: str) -> bool:
        """Return True if the weight of the norm is trained, so that the scaled values are kept."""
        return f"{name}.weight" in self.weights

    def readers(self, region: Region) -> int:
        """Return the number of layers that keep the input of a region."""
        return sum(self.reads(f"{region.module}.{name}") for name in region.columns)

    def reads(self, layer: str) -> bool:
        """Return True if the linear layer keeps its input."""
        own = self.keeps_inputs or f"{layer}.weight" in self.weights
        return own or (layer in dict(self.ranks) and not self.dropout)

    def adapters(self, region: Region) -> tuple[tuple[str, int], ...]:
        """Return the layers of a region that have an adapter, each with the adapter's rank."""
        names = [f"{region.module}.{name}" for name in (*region.columns, region.row)]
        return tuple((name, rank) for name, rank in self.ranks if name in names)


def fully_trained_block(spec: Family) -> TrainableBlock:
    """Return the `TrainableBlock` of a block that is trained whole."""
    names = set()
    for part in spec.block:
        if isinstance(part, Region):
            layers = (*part.columns, part.row, *part.per_head)
            names |= {f"{part.module}.{name}.weight" for name in layers}
        else:
            names.add(f"{part}.weight")
    return TrainableBlock(weights=frozenset(names))


SCORE_GRADIENT_COPIES = 2
"""Gradients of eager attention scores alive at once, in the format of the softmax."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockActivations:
    """Activation bytes of one block, per token and rank."""

    norms: int
    """Inputs and outputs of the block's norms (replicated on each tensor-parallel rank)."""
    attention: int
    """Queries, keys, values, attention output and softmax statistics."""
    scores: int
    """Attention probabilities; 0 unless attention is eager."""
    feed_forward: int
    """Tensors kept inside the feed-forward layer."""
    boundary: int
    """Input of the block, which is kept when the block is recomputed."""
    products: int
    """Outputs of matrix products and of fused attention, which `selective` recomputation keeps in
    addition to the block's input.
    """
    feed_forward_gradient: int
    """Gradients alive during the backward pass of the feed-forward layer."""
    attention_gradient: int
    """Gradients alive during the backward pass of attention."""

    @property
    def saved(self) -> int:
        """Bytes per token kept from forward to backward."""
        return self.norms + self.attention + self.scores + self.feed_forward

    def backward_extra(self, kept: int) -> int:
        """Return the peak bytes per token of the block's backward pass beyond the `kept` bytes.

        The feed-forward layer runs backward first; its activations are freed before attention
        follows.
        """
        return max(
            self.feed_forward_gradient,
            self.attention_gradient + self.saved - kept - self.feed_forward,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageActivations:
    """Activation bytes of one rank of a pipeline stage."""

    forward_end: int
    """Bytes kept after the forward pass of the last micro-batch in flight."""
    block_backward: int
    """Bytes added during the backward pass of one block: recomputed activations and gradients."""
    last_block: int
    """All activation bytes while the first block, the last to run backward, does so."""
    offloaded: int
    """Block inputs kept in host memory instead of on the device."""

    @classmethod
    def of_all(cls, each: Iterable[StageActivations], beside: int = 0) -> StageActivations:
        """Return the sum of what parts of a rank keep, and the largest of what they add while they
        run one after the other, with `beside` more bytes.
        """
        parts = list(each)
        return cls(
            forward_end=sum(part.forward_end for part in parts),
            block_backward=beside + max((part.block_backward for part in parts), default=0),
            last_block=beside + max((part.last_block for part in parts), default=0),
            offloaded=sum(part.offloaded for part in parts),
        )


def block_activations(
    model: ModelConfig,
    *,
    sequence_length: int,
    element: int,
    tensor: int = 1,
    autocast: bool = False,
    liger: bool = False,
    learning: TrainableBlock | None = None,
) -> BlockActivations:
    """Return the activations of one block.

    `sequence_length` counts whole sequences: eager scores grow with it. `element` is the size of
    the compute type in bytes. `tensor` ranks share the heads and the feed-forward width. Ulysses
    ranks share tokens outside attention and heads inside it, so bytes per token stay the same.
    Under `autocast`, weights and the residual stream are fp32. `liger` replaces transformers' norms
    and SwiGLU by Liger's. `learning` is None if the whole block is trained.
    """
    spec = spec_of(model)
    learning = learning or fully_trained_block(spec)
    hidden, up = model.hidden_size, spec.feed_forward
    width = shapes.head_dim(model)
    heads = model.num_attention_heads / tensor
    key_heads = shapes.own_key_value_heads(model, tensor)
    ffn = model.intermediate_size / tensor
    residual = FP32 if autocast else element
    eager = model.attention is AttentionKind.eager

    scores = 0.0
    softmax = FP32 if autocast or spec.softmax_in_fp32 else element
    if eager:
        # Where softmax runs in fp32, as under autocast, its result is cast for the product.
        fp32_copy = FP32 if element < softmax else 0
        scores = heads * sequence_length * (element + fp32_copy)
    if eager or _expands_keys(model, sequence_length):
        key_heads = heads
    # Outputs of the projections and of attention; the last two have the block's full width.
    attended = 0.0 if eager else heads * width * element + FP32 * heads
    own_keys = shapes.own_key_value_heads(model, tensor)
    projected = width * (heads + 2 * own_keys) + up.matrices * ffn + 2 * hidden
    products = element * projected + attended
    query_norms = 0.0
    for name, count in zip(spec.attention.per_head, (heads, own_keys), strict=False):
        learns = learning.norm(f"{spec.attention.module}.{name}")
        query_norms += count * _norm_bytes(spec.norm, width, element, liger, learns)
    qkvo = element * width * (2 * heads + 2 * key_heads)
    statistics = 0.0 if eager else FP32 * heads
    inner = ffn * element * (spec.activation.saved_by_liger if liger else spec.activation.kept)
    # Input of a region's last product; fused attention keeps its output anyway.
    kept = qkvo
    if eager and not learning.reads(f"{spec.attention.module}.{spec.attention.row}"):
        kept -= element * width * heads
    if not learning.reads(f"{up.module}.{up.row}"):
        inner -= element * ffn
    separate = (heads, own_keys, own_keys)
    counts = separate if spec.attention.fused == 1 else (sum(separate),)
    projections = [width * count for count in counts]
    added = partial(_adapters_bytes, hidden=hidden, element=element, learning=learning)
    in_attention = added(spec.attention, projections, inner=heads * width)
    in_feed_forward = added(up, [ffn] * len(up.columns), inner=ffn)
    return BlockActivations(
        norms=round(_norms_bytes(model, element, learning, autocast=autocast, liger=liger)),
        attention=round(kept + query_norms + statistics + in_attention),
        scores=round(scores),
        feed_forward=round(inner + in_feed_forward),
        boundary=round(hidden * residual),
        products=round(products),
        feed_forward_gradient=round(2 * ffn * element + hidden * (element + residual)),
        attention_gradient=round(
            qkvo
            + hidden * (element + residual)
            + (SCORE_GRADIENT_COPIES * softmax * heads * sequence_length if eager else 0)
        ),
    )


def tiled_activations(block: BlockActivations, tiles: int, *, gradients: int) -> BlockActivations:
    """Return the block with its feed-forward layer computed in `tiles` tiles, each recomputed in
    the backward pass.

    `gradients` is the bytes per token of the gradients of the layer's input and output, which exist
    for all tokens at once.
    """
    if tiles == 1:
        return block
    inside = block.feed_forward + max(block.feed_forward_gradient - gradients, 0)
    return replace(block, feed_forward=0, feed_forward_gradient=round(inside / tiles) + gradients)


def stage_activations(
    plan: LayoutPlan,
    *,
    blocks: int,
    in_flight: int,
    element: int,
    autocast: bool,
    traced: BlockActivations | None = None,
    learning: Sequence[tuple[TrainableBlock, int]] | None = None,
) -> StageActivations:
    """Return the activations of the `blocks` blocks of a pipeline stage.

    `in_flight` is the number of micro-batches whose activations are alive at once. `element` is the
    size of the compute type in bytes. Under `autocast`, weights and the residual stream are fp32.
    `traced` is a traced block on this rank, if the model was traced. `learning` pairs the trained
    parts of a block with the number of such blocks that gradients reach; the other blocks keep
    nothing. None means that all blocks are trained whole.
    """
    closed = partial(
        block_activations,
        plan.config.model,
        sequence_length=plan.batch.sequence_length,
        element=element,
        tensor=plan.mesh.tensor,
        autocast=autocast,
        liger=bool(plan.config.kernels.liger),
    )
    whole = traced or closed()
    kinds = [(whole, blocks)]
    if learning is not None:
        kinds = [(closed(learning=each), count) for each, count in learning]
        if traced is not None:
            kinds = [
                (scale_traced_block(traced, whole=closed(), part=block), count)
                for block, count in kinds
            ]
    gradients = plan.config.model.hidden_size * (element + (FP32 if autocast else element))
    tiles = plan.config.kernels.mlp_tiles
    parts = (
        _identical_blocks(
            plan, tiled_activations(block, tiles, gradients=gradients), count, in_flight
        )
        for block, count in kinds
    )
    return StageActivations.of_all(parts, ring_bytes(plan, element) if blocks else 0)


def scale_traced_block(
    block: BlockActivations, *, whole: BlockActivations, part: BlockActivations
) -> BlockActivations:
    """Return a traced block scaled down: each part shrinks in the ratio of the closed forms.

    `whole` is the closed form of the traced block. `part` is the closed form of the block wanted:
    the share of a tensor-parallel rank, or a partly frozen block.
    """
    shares = {}
    for item in fields(BlockActivations):
        before, after = getattr(whole, item.name), getattr(part, item.name)
        share = after / before if before else 1.0
        shares[item.name] = round(getattr(block, item.name) * share)
    return BlockActivations(**shares)


def _identical_blocks(
    plan: LayoutPlan, block: BlockActivations, blocks: int, in_flight: int
) -> StageActivations:
    settings, tokens = recomputing_section(plan.config), tokens_per_rank(plan)
    if settings is None:
        backward = block.backward_extra(block.saved)
        return StageActivations(
            forward_end=tokens * block.saved * blocks * in_flight,
            block_backward=tokens * backward,
            last_block=tokens * (block.saved + backward) if blocks else 0,
            offloaded=0,
        )
    # Upper bound of checkpointed blocks, wherever in the model the stage begins.
    checkpointed = -(-blocks // settings.every_kth_block)
    boundary = _boundary_bytes(block, settings, plan.mesh.tensor)
    offloads = settings.offload_to_cpu and plan.hardware.accelerator is not Accelerator.cpu
    on_device = 1 if offloads else checkpointed * in_flight
    whole = (blocks - checkpointed) * block.saved * in_flight
    # Products that are kept in addition to the input are not recomputed.
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


def tokens_per_rank(plan: LayoutPlan) -> int:
    """Return the tokens of a micro-batch on one rank: the ranks of the sequence and context axes
    share each sequence.
    """
    share = -(-plan.batch.sequence_length // plan.mesh.sequence_parts)
    return plan.batch.micro_batch_size * share


def ring_bytes(plan: LayoutPlan, element: int) -> int:
    """Return the bytes of keys and values in flight while ring attention runs backward in a block
    (`engines/ring_attention.py`): those in use and those arriving, three sets of their gradients in
    fp32 (the block's, the ones sent, the ones arriving), and the queries' gradient in fp32. With
    one context rank nothing is sent or arrives.
    """
    model, mesh = plan.config.model, plan.mesh
    if not uses_ring(plan.config):
        return 0
    # Ulysses and tensor ranks repeat keys where they are more than the heads.
    key_heads = max(shapes.key_value_heads(model) / mesh.tensor, mesh.sequence, 1)
    keys, queries = 2 * key_heads, model.num_attention_heads / mesh.tensor
    of_keys = element + FP32 if mesh.context == 1 else 2 * element + 3 * FP32
    each = keys * of_keys + queries * FP32
    return round(tokens_per_rank(plan) * shapes.attended_width(model) * each)


def compute_bytes(plan: LayoutPlan) -> int:
    """Return the bytes per element of an activation."""
    return BYTES[precision_of(plan.config.precision).format]


def _boundary_bytes(block: BlockActivations, settings: Recomputing, tensor: int) -> int:
    return block.boundary // (tensor if settings.partition_across_tensor_ranks else 1)


def _norms_bytes(
    model: ModelConfig, element: int, learning: TrainableBlock, *, autocast: bool, liger: bool
) -> float:
    """Return the bytes per token that a block's two norms and their outputs take.

    Autocast casts an output once for each product.
    """
    spec, hidden = spec_of(model), model.hidden_size
    residual = FP32 if autocast else element
    first, *others = (name for name in spec.block if isinstance(name, str))
    norms = sum(
        _norm_bytes(spec.norm, hidden, residual, liger, learning.norm(name)) for name in others
    )
    if not learning.begins:
        norms += _norm_bytes(spec.norm, hidden, residual, liger, learning.norm(first))
    elif learning.norm(first):
        norms += hidden * residual  # the scaled values, or the input
    readers = [learning.readers(region) for region in (spec.attention, spec.feed_forward)]
    return norms + hidden * element * sum(count if autocast else min(count, 1) for count in readers)


def _adapters_bytes(
    region: Region,
    widths: Sequence[float],
    *,
    inner: float,
    hidden: int,
    element: int,
    learning: TrainableBlock,
) -> float:
    """Return the bytes per token that the adapters of a region keep.

    `widths` are those of the outputs of its first layers, `inner` is that of its last layer's
    input.
    """
    names = [f"{region.module}.{name}" for name in region.columns]
    outputs = dict(zip(names, widths, strict=True))
    return sum(
        _adapter_bytes(
            rank, hidden if name in outputs else inner, outputs.get(name, hidden), element, learning
        )
        for name, rank in learning.adapters(region)
    )


def _adapter_bytes(
    rank: int, inputs: float, outputs: float, element: int, learning: TrainableBlock
) -> float:
    """Return the bytes per token that an adapter keeps in addition to its input.

    These are the low-rank product, with dropout a copy of the input and a mask, and with magnitudes
    (DoRA) the outputs that they scale (`trainctl.train.adapters.layers`).
    """
    size = float(element * rank)
    if learning.dropout:
        size += inputs * (element + 1)
    if learning.magnitudes:
        # With dropout the outputs of layer and adapter are scaled by different numbers.
        size += outputs * element * (2 if learning.dropout else 1)
    return size


def _norm_bytes(norm: Norm, width: int, element: int, liger: bool, learns: bool) -> int:
    """Return the bytes per token that a norm keeps in addition to its output.

    These are its statistics and its input. Some norms keep the input in fp32 (its own storage if
    it is fp32 already), and the scaled values in the input's type if the weight is trained. Liger's
    norm keeps the input unconverted (ops/rms_norm.py of liger-kernel).
    """
    copies = norm.copies_in_fp32 and not liger
    scaled = element if learns else 0
    return width * (FP32 + scaled if copies else element) + FP32 * norm.statistics


def _expands_keys(model: ModelConfig, sequence_length: int) -> bool:
    """Return True if a mask makes transformers repeat keys and values for every query head."""
    spec = spec_of(model)
    window = model.sliding_window if spec.has_window and not spec.is_directory else None
    return model.attention is AttentionKind.sdpa and window is not None and window < sequence_length
