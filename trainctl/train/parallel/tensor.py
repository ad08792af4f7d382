"""Tensor parallelism: the skeleton's matrices cut to this rank's shards, before it has weights.

Megatron-LM's scheme (arXiv:1909.08053): projections into a region are split by outputs, the one out
of it by inputs, the vocabulary by tokens. With sequence-sharded norms (arXiv:2205.05198) what lies
between the regions is split along the sequence as well.

DeepSpeed's own AutoTP cuts a model that every rank holds whole and refuses a pipeline, so the
modules are changed here; DeepSpeed sees the mesh as its `mpu` (docs/decisions/009-*.md).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.engines.mesh import Axis
from trainctl.engines.shards import ParameterPiece, Pieces, Shard
from trainctl.errors import TrainctlError
from trainctl.options.model import Region
from trainctl.plan.trainable import LORA_A, LORA_B, MAGNITUDE
from trainctl.train.adapters.layers import Adapted, added_parameters
from trainctl.train.parallel.collectives import (
    Copy,
    GatherSequence,
    GatherToRegion,
    GatherWidth,
    Reduce,
    Scatter,
    gather,
    sum_over,
)
from trainctl.train.parallel.row_layers import RowConv1D, RowLinear, row_class
from trainctl.train.parallel.shard_plan import cut_of, has_parts


def shard_model(
    model: PreTrainedModel, pieces: Pieces, axis: Axis, *, sequence_sharded_norms: bool
) -> Pieces:
    """Replace the parameters of a skeleton by this rank's shards, and let its modules communicate.

    Args:
        model: On the meta device.
        axis: The tensor axis of the mesh.
        sequence_sharded_norms: Split what lies between the regions along the sequence.

    Returns:
        The pieces of the parameters that the model has now.
    """
    where = cut_of(model)
    where.check(model, sequence_sharded_norms=sequence_sharded_norms)
    decoder = getattr(model, where.decoder)
    blocks = getattr(decoder, where.blocks)
    embedding, head = getattr(decoder, where.embedding), getattr(model, where.head)
    by_token = {*embedding.parameters(), *head.parameters()}
    shards: dict[nn.Parameter, tuple[nn.Parameter, ParameterPiece]] = {}

    def cut(module: nn.Module, name: str, dim: int, fused: int = 1) -> None:
        whole = getattr(module, name)
        if whole is None or whole in shards:
            return
        if whole.shape[dim] % (axis.size * fused) and whole not in by_token:
            raise TrainctlError(
                f"{pieces[whole].name} has {whole.shape[dim]} of what {axis.size} ranks share"
            )
        shard, shape = Shard.split(
            whole.shape, dim=dim, index=axis.index, count=axis.size, fused=fused
        )
        empty = torch.empty(shape, dtype=whole.dtype, device="meta")
        part = nn.Parameter(empty, requires_grad=whole.requires_grad)
        shards[whole] = part, replace(pieces[whole], shard=shard)

    def keep(whole: nn.Parameter | None, *, partial: bool) -> None:
        """A parameter that every tensor rank has whole; the first of them saves it."""
        if whole is not None and whole not in shards:
            shards[whole] = (
                whole,
                replace(pieces[whole], is_saved_here=axis.is_first, has_partial_gradient=partial),
            )

    tokens = Vocabulary(axis, model.config.vocab_size)
    if isinstance(embedding, nn.Embedding):  # a pipeline stage may have none
        cut(embedding, "weight", dim=0)
        _split_by_tokens(embedding, tokens)
    if isinstance(head, nn.Linear):
        cut(head, "weight", dim=0)
        cut(head, "bias", dim=0)
        head.out_features = tokens.count
        head.register_forward_pre_hook(_copy_input(axis))
    for block in blocks:
        for region in where.regions:
            if not has_parts(block, region.module, (*region.columns, region.row)):
                continue
            module = block.get_submodule(region.module)
            if region.is_experts:
                shard_experts(module, region, axis, cut)
                keep(getattr(module, f"{region.row}_bias", None), partial=True)
                continue
            _shard_region(module, region, axis, cut, sequence_sharded=sequence_sharded_norms)
            for name in (*region.columns, region.row):  # what ranks have whole of an adapter
                for parameter in added_parameters(getattr(module, name)):
                    keep(parameter, partial=True)
            row = getattr(module, region.row)
            keep(row.bias, partial=sequence_sharded_norms)
            for name in (*region.per_head, *region.across_heads):
                for parameter in getattr(module, name).parameters():
                    keep(parameter, partial=True)
        for parameter in block.parameters():
            keep(parameter, partial=sequence_sharded_norms)
    for parameter in model.parameters():
        keep(parameter, partial=False)
    if sequence_sharded_norms:
        blocks[0].register_forward_pre_hook(_scatter_input(axis), with_kwargs=True)
        blocks[-1].register_forward_hook(
            lambda module, args, output: GatherSequence.apply(output, axis)
        )
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, shards[parameter][0])
    return dict(shards.values())


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that a tensor rank has, of all: the last one has fewer if they do not divide."""

    axis: Axis
    size: int
    """Tokens in all."""

    @property
    def share(self) -> int:
        """Tokens of the first rank."""
        return -(-self.size // self.axis.size)

    @property
    def first(self) -> int:
        return self.axis.index * self.share

    @property
    def count(self) -> int:
        """Tokens of this rank."""
        return min(self.size - self.first, self.share)


def vocabulary_of(model: PreTrainedModel, axis: Axis) -> Vocabulary | None:
    """How a model's is split over tensor ranks; None where there is one."""
    return Vocabulary(axis, model.config.vocab_size) if axis.size > 1 else None


def sum_partial_gradients(pieces: Pieces, axis: Axis) -> None:
    """Sum gradients to which each tensor rank contributes a part, before DeepSpeed sees them."""

    def summed(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=axis.group)
        return gradient

    for parameter, piece in pieces.items():
        if piece.has_partial_gradient and parameter.requires_grad:
            parameter.register_hook(summed)


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, *, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropy in nats of logits that are split over the vocabulary, of each position.

    Beside it the softmax's log-normalisers; both fp32, (samples, length), and 0 where a position
    does not count.

    Args:
        logits: (samples, length, tokens of this rank).
        labels: (samples, length), of the whole vocabulary.
        vocabulary: How it is split.
        ignored: Label of a position that does not count.
    """
    found: tuple[torch.Tensor, torch.Tensor] = _CrossEntropy.apply(
        logits.float(), labels, vocabulary, ignored
    )
    return found


def gather_vocabulary(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return the logits of the whole vocabulary, on all tensor ranks; without a gradient."""
    padded = F.pad(logits.detach(), (0, vocabulary.share - vocabulary.count))
    return gather(padded, vocabulary.axis, dim=-1)[..., : vocabulary.size]


class ExpertsWithBias(nn.Module):
    """Experts whose last bias, which every rank has whole, is added in as many parts as ranks.

    What the ranks put out is summed. Before the class that transformers has for them.
    """

    shared_bias: str
    bias_shares: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # What an object has itself is found before its parameters.
        whole: Any = self._parameters[self.shared_bias]
        self.__dict__[self.shared_bias] = whole / self.bias_shares
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__[self.shared_bias]


class VocabularyEmbedding(nn.Embedding):
    """An embedding split by tokens: a rank looks up its own, and the ranks' results are summed.

    Before the class that transformers has for it, whose way to look up it keeps (scaled, say).
    """

    tokens: Vocabulary

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = input - self.tokens.first
        other = (local < 0) | (local >= self.num_embeddings)
        found = super().forward(local.masked_fill(other, 0))
        return Reduce.apply(found.masked_fill(other[..., None], 0.0), self.tokens.axis)


def _split_by_tokens(embedding: Any, tokens: Vocabulary) -> None:
    # The same object, since the model, its hooks and its tied weight know it.
    kind = type(embedding)
    embedding.__class__ = type(kind.__name__, (VocabularyEmbedding, kind), {})
    embedding.tokens = tokens
    embedding.num_embeddings = tokens.count
    if embedding.padding_idx is not None:  # the row that learns nothing, if it is of this rank
        local = embedding.padding_idx - tokens.first
        embedding.padding_idx = local if 0 <= local < embedding.num_embeddings else None


def _shard_region(
    module: Any, region: Region, axis: Axis, cut: Any, *, sequence_sharded: bool
) -> None:
    for name in region.columns:
        layer = getattr(module, name)
        if isinstance(layer, Conv1D):
            cut(layer, "weight", dim=1, fused=region.fused)
            layer.nf //= axis.size
        else:
            cut(layer, "weight", dim=0, fused=region.fused)
            layer.out_features //= axis.size
        for parameter in ("bias", LORA_B, MAGNITUDE):
            if getattr(layer, parameter, None) is not None:
                cut(layer, parameter, dim=0, fused=region.fused)
    row = getattr(module, region.row)
    if isinstance(row, Adapted):
        cut(row, LORA_A, dim=1)
    # The same object below, so that the parameter is found where it was.
    if isinstance(row, Conv1D):
        cut(row, "weight", dim=0)
        row.__class__ = row_class(row, RowConv1D)
        row.nx //= axis.size
    else:
        cut(row, "weight", dim=1)
        row.__class__ = row_class(row, RowLinear)
        row.in_features //= axis.size
    row.axis, row.sequence_sharded = axis, sequence_sharded
    for name in region.values:
        cut(module, name, dim=0)
    for name in region.widths:
        setattr(module, name, getattr(module, name) // axis.size)
    for name in region.across_heads:
        _norm_across_ranks(getattr(module, name), axis)
    if region.is_uneven:
        _choose_own_heads(module, region, axis)
    enter = GatherToRegion if sequence_sharded else Copy
    module.register_forward_pre_hook(_on_hidden_states(enter, axis), with_kwargs=True)


def shard_experts(module: Any, region: Region, axis: Axis, cut: Any) -> None:
    """Every rank has a part of each expert: rows of gate and up, columns of down.

    The router lies outside and is the same on all ranks: so is its gradient, since that of the
    weights that it gives is summed.
    """
    gives_last = getattr(module, "is_transposed", False)
    for name in region.columns:
        is_bias = getattr(module, name).dim() == 2
        cut(module, name, dim=2 if gives_last and not is_bias else 1, fused=region.fused)
    cut(module, region.row, dim=1 if gives_last else 2)
    if hasattr(module, f"{region.row}_bias"):
        kind = type(module)
        module.__class__ = type(kind.__name__, (ExpertsWithBias, kind), {})
        module.shared_bias, module.bias_shares = f"{region.row}_bias", axis.size
    for name in ("intermediate_size", "intermediate_dim"):
        if hasattr(module, name):
            setattr(module, name, getattr(module, name) // axis.size)

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, index, weights = args
        return Copy.apply(hidden, axis), index, Copy.apply(weights, axis)

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(lambda _, args, output: Reduce.apply(output, axis))


def _norm_across_ranks(norm: nn.Module, axis: Axis) -> None:
    """A norm over all heads sees those of all ranks; each goes on with its own."""
    norm.register_forward_pre_hook(lambda _, args: (GatherWidth.apply(args[0], axis), *args[1:]))
    norm.register_forward_hook(
        lambda _, args, output: output.chunk(axis.size, dim=-1)[axis.index].contiguous()
    )


def _choose_own_heads(module: Any, region: Region, axis: Axis) -> None:
    """From the ranks' equal parts of queries, keys and values to the heads of this rank.

    The three are of unequal width, so that equal parts of the matrix are no heads; the matrix stays
    cut in equal parts, and what it gives is exchanged.
    """
    config = copy.copy(module.config)
    queries = config.num_attention_heads * module.head_dim
    keys = config.num_key_value_heads * module.head_dim
    config.num_attention_heads //= axis.size
    config.num_key_value_heads //= axis.size
    module.config, module.num_key_value_heads = config, config.num_key_value_heads

    def choose(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        parts = GatherWidth.apply(output, axis).split((queries, keys, keys), dim=-1)
        return torch.cat([p.chunk(axis.size, dim=-1)[axis.index] for p in parts], dim=-1)

    getattr(module, region.columns[0]).register_forward_hook(choose)


def _on_hidden_states(function: Any, axis: Axis) -> Any:
    """Return a pre-hook that applies a function to the hidden states, however they are passed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (function.apply(args[0], axis), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": function.apply(kwargs["hidden_states"], axis)}

    return hook


def _scatter_input(axis: Axis) -> Any:
    return _on_hidden_states(Scatter, axis)


def _copy_input(axis: Axis) -> Any:
    return lambda module, args: (Copy.apply(args[0], axis), *args[1:])


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy whose softmax runs over the ranks, and its log-normalisers.

    The gradients are softmax minus one-hot, and softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axis = vocabulary.axis
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        exponentials = (logits - largest[..., None]).exp_()
        total = sum_over(exponentials.sum(dim=-1), axis)
        local = labels - vocabulary.first
        other = (local < 0) | (local >= vocabulary.count)
        local = local.masked_fill(other, 0)[..., None]
        target = logits.gather(-1, local).squeeze(-1).masked_fill(other, 0.0)
        normalisers = total.log() + largest
        losses = normalisers - sum_over(target, axis)
        counts = labels != ignored
        normalisers = normalisers.masked_fill(~counts, 0.0)
        probabilities = exponentials.div_(total[..., None])
        ctx.save_for_backward(probabilities, local, other, counts)
        return losses.masked_fill(~counts, 0.0), normalisers

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, of_normalisers: torch.Tensor) -> Any:  # type: ignore[override]
        probabilities, local, other, counts = ctx.saved_tensors
        of_losses = counts * gradient
        result = probabilities * (of_losses + counts * of_normalisers)[..., None]
        result.scatter_add_(-1, local, -of_losses.masked_fill(other, 0.0)[..., None])
        return result, None, None, None
