"""Tensor parallelism: a skeleton's matrices are cut to this rank's shards before it has weights.

The scheme is Megatron-LM's (arXiv:1909.08053): projections into a region are split by outputs, the
projection out of it by inputs, the vocabulary by tokens. With sequence-sharded norms
(arXiv:2205.05198), the activations between the regions are also split along the sequence.
Key-value heads that are fewer than the ranks are each on several neighbours, whose gradients of
them are summed.

DeepSpeed's own AutoTP cuts a model that every rank holds whole, and refuses a pipeline. So the
modules are changed here, and DeepSpeed sees the mesh as its `mpu` (docs/decisions/009-*.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainctl.engines.process import Axis
from trainctl.engines.shards import ParameterPiece, Pieces, Shard
from trainctl.errors import TrainctlError
from trainctl.options.model import Region
from trainctl.plans.trainable import LORA_A, LORA_B, MAGNITUDE
from trainctl.train.adapters.layers import LoraLayer, added_parameters
from trainctl.train.models.module import ModuleModel
from trainctl.train.parallel.experts import (
    Copy,
    GatherSequence,
    GatherToRegion,
    GatherWidth,
    Reduce,
    Scatter,
    all_gather,
    all_reduce,
)
from trainctl.train.parallel.module_plan import (
    RowConv1D,
    RowLinear,
    cut_module,
    row_class,
    vocabulary_layers,
)
from trainctl.train.parallel.shard_plan import has_parts, shard_plan_of


def shard_model(
    model: PreTrainedModel, pieces: Pieces, axis: Axis, *, sequence_sharded_norms: bool
) -> Pieces:
    """Replace a skeleton's parameters by this rank's shards, and add collectives to its modules.

    Args:
        sequence_sharded_norms: Whether to split activations between regions along the sequence.

    Returns:
        The pieces of the parameters that the model has now.
    """
    if isinstance(model, ModuleModel):
        shards = _shard_vocabulary(model, vocabulary_layers(model), pieces, axis)
        cut_module(model, shards, axis)
        for parameter in model.parameters():
            shards.keep(parameter, partial=False)
        return shards.put_into(model)
    where = shard_plan_of(model)
    where.check(model, sequence_sharded_norms=sequence_sharded_norms)
    decoder = getattr(model, where.decoder)
    blocks = getattr(decoder, where.blocks)
    ends = (getattr(decoder, where.embedding), *where.vocabulary_head(model))
    shards = _shard_vocabulary(model, ends, pieces, axis)
    for block in blocks:
        for region in where.regions:
            if has_parts(block, region.module, (*region.columns, region.row)):
                module = block.get_submodule(region.module)
                _shard_part(module, region, shards, sequence_sharded=sequence_sharded_norms)
        for parameter in block.parameters():
            shards.keep(parameter, partial=sequence_sharded_norms)
    for parameter in model.parameters():
        shards.keep(parameter, partial=False)
    if sequence_sharded_norms:
        blocks[0].register_forward_pre_hook(_on_hidden_states(Scatter, axis), with_kwargs=True)
        blocks[-1].register_forward_hook(
            lambda module, args, output: GatherSequence.apply(output, axis)
        )
    return shards.put_into(model)


def _shard_vocabulary(
    model: PreTrainedModel, layers: Sequence[nn.Module], pieces: Pieces, axis: Axis
) -> _Shards:
    """Cut embedding and head to this rank's tokens; a pipeline stage may lack them."""
    uneven = {parameter for layer in layers for parameter in layer.parameters()}
    shards = _Shards(pieces, axis, uneven=uneven)
    tokens = Vocabulary(axis, model.config.vocab_size)
    for layer in layers:
        if isinstance(layer, nn.Embedding):
            shards.cut(layer, "weight", dim=0)
            _split_by_tokens(layer, tokens)
        elif isinstance(layer, nn.Linear):
            shards.cut(layer, "weight", dim=0)
            shards.cut(layer, "bias", dim=0)
            layer.out_features = tokens.count
            layer.register_forward_pre_hook(lambda _, args: (Copy.apply(args[0], axis), *args[1:]))
    return shards


class _Shards:
    """Parameters that this rank keeps of a skeleton, each with its piece.

    Args:
        uneven: Parameters that may be split into parts of unequal size.
    """

    def __init__(self, pieces: Pieces, axis: Axis, uneven: set[nn.Parameter]) -> None:
        self.axis = axis
        self._pieces, self._uneven = pieces, uneven
        self._kept: dict[nn.Parameter, tuple[nn.Parameter, ParameterPiece]] = {}

    def cut(self, module: nn.Module, name: str, dim: int, fused: int = 1, copies: int = 1) -> None:
        """Replace a parameter by this rank's shard of it, unless that is done or there is none.

        Args:
            copies: Number of neighbouring ranks that get the same shard; the first one saves it.
        """
        whole, axis = getattr(module, name), self.axis
        if whole is None or whole in self._kept:
            return
        count = axis.size // copies
        if whole.shape[dim] % (count * fused) and whole not in self._uneven:
            raise TrainctlError(
                f"{self._pieces[whole].name} has {whole.shape[dim]} of what {axis.size} ranks share"
            )
        shard, shape = Shard.split(
            whole.shape, dim=dim, index=axis.index // copies, count=count, fused=fused
        )
        empty = torch.empty(shape, dtype=whole.dtype, device=whole.device)
        part = nn.Parameter(empty, requires_grad=whole.requires_grad)
        piece = self._pieces[whole]
        saved = piece.is_saved_here and axis.index % copies == 0
        piece = replace(piece, shard=shard, gradient_parts=copies, is_saved_here=saved)
        self._kept[whole] = part, piece

    def keep(self, whole: nn.Parameter | None, *, partial: bool) -> None:
        """Keep a parameter whole on every tensor rank; the first rank saves it."""
        if whole is not None and whole not in self._kept:
            piece = self._pieces[whole]
            if not piece.is_expert:  # experts are others on each rank
                parts = self.axis.size if partial else 1
                piece = replace(piece, is_saved_here=self.axis.is_first, gradient_parts=parts)
            self._kept[whole] = whole, piece

    def put_into(self, model: nn.Module) -> Pieces:
        """Set the shards in the model's modules, and return the pieces of its parameters."""
        for module in model.modules():
            own = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name, parameter in own:
                setattr(module, name, self._kept[parameter][0])
        return dict(self._kept.values())


def _shard_part(
    module: nn.Module, region: Region, shards: _Shards, *, sequence_sharded: bool
) -> None:
    """Split one region of a block, and keep what every rank has whole of it."""
    if region.is_experts and hasattr(module, "expert_axis"):
        return  # the expert axis has cut them
    if region.is_experts:
        shard_experts(module, region, shards.axis, shards.cut)
        whole = [f"{name}_{LORA_A}" for name in region.columns]
        for name in (f"{region.row}_bias", f"{region.row}_{LORA_B}", *whole):
            shards.keep(getattr(module, name, None), partial=True)
        return
    _shard_region(module, region, shards.axis, shards.cut, sequence_sharded=sequence_sharded)
    for name in (*region.columns, region.row):  # adapter tensors that every rank has whole
        for parameter in added_parameters(getattr(module, name)):
            shards.keep(parameter, partial=True)
    shards.keep(getattr(module, region.row).bias, partial=sequence_sharded)
    for name in (*region.per_head, *region.across_heads):
        for parameter in getattr(module, name).parameters():
            shards.keep(parameter, partial=True)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """This tensor rank's tokens of the vocabulary; the last rank may have fewer."""

    axis: Axis
    size: int
    """Tokens of the whole vocabulary."""

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
    """Return the split of a model's vocabulary over tensor ranks; None with a single rank."""
    return Vocabulary(axis, model.config.vocab_size) if axis.size > 1 else None


def sum_partial_gradients(pieces: Pieces, axis: Axis, timeout: timedelta) -> None:
    """Add hooks that sum partial gradients over the tensor ranks that hold the same piece, before
    DeepSpeed sees them; on all tensor ranks together.
    """
    groups: dict[int, dist.ProcessGroup] = {axis.size: axis.group}

    def summing_hook(parts: int) -> Callable[[torch.Tensor], torch.Tensor]:
        if parts not in groups:
            first = axis.index - axis.index % parts
            neighbours = axis.ranks[first : first + parts]
            groups[parts] = dist.new_group(
                neighbours, timeout=timeout, use_local_synchronization=True
            )

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.contiguous()
            dist.all_reduce(gradient, group=groups[parts])
            return gradient

        return summed

    for parameter, piece in pieces.items():
        if piece.gradient_parts > 1:
            # Frozen ones too: NCCL splits groups off the group of all ranks, which all wait for.
            hook = summing_hook(piece.gradient_parts)
            if parameter.requires_grad:
                parameter.register_hook(hook)


def vocabulary_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, *, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cross entropy and log-normalisers of logits that are split over the vocabulary.

    Both are in nats, fp32, (samples, length), and 0 at positions that do not count.

    Args:
        logits: (samples, length, tokens of this rank).
        labels: (samples, length), ids in the whole vocabulary.
        ignored: Label of positions that do not count.
    """
    return _CrossEntropy.apply(logits.float(), labels, vocabulary, ignored)


def gather_logits(logits: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return the logits of the whole vocabulary on all tensor ranks, without a gradient."""
    padded = F.pad(logits.detach(), (0, vocabulary.share - vocabulary.count))
    return all_gather(padded, vocabulary.axis, dim=-1)[..., : vocabulary.size]


class ExpertsWithBias(nn.Module):
    """Mixin of experts whose output bias is whole on every rank, placed before transformers' class.

    The ranks' outputs are summed, so each rank adds an equal fraction of the bias.
    """

    shared_bias: str
    bias_shares: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # Instance attributes are found before parameters.
        whole: Any = self._parameters[self.shared_bias]
        self.__dict__[self.shared_bias] = whole / self.bias_shares
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__[self.shared_bias]


class VocabularyEmbedding(nn.Embedding):
    """Mixin of an embedding split by tokens, placed before transformers' class.

    A rank looks up its own tokens, and the ranks' results are summed. The lookup itself stays the
    class's own, which may scale it.
    """

    tokens: Vocabulary

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        local = input - self.tokens.first
        other = (local < 0) | (local >= self.num_embeddings)
        found = super().forward(local.masked_fill(other, 0))
        return Reduce.apply(found.masked_fill(other[..., None], 0.0), self.tokens.axis)


def _split_by_tokens(embedding: Any, tokens: Vocabulary) -> None:
    # Change the class in place: the model, its hooks and its tied weight refer to this object.
    kind = type(embedding)
    embedding.__class__ = type(kind.__name__, (VocabularyEmbedding, kind), {})
    embedding.tokens = tokens
    embedding.num_embeddings = tokens.count
    if embedding.padding_idx is not None:  # the row that gets no gradient, if this rank has it
        local = embedding.padding_idx - tokens.first
        embedding.padding_idx = local if 0 <= local < embedding.num_embeddings else None


def _shard_region(
    module: Any, region: Region, axis: Axis, cut: Any, *, sequence_sharded: bool
) -> None:
    head_copies = _copies_of_heads(module, axis)
    norm_copies = [1, head_copies]  # norms of queries and of keys
    for place, name in enumerate(region.columns):
        layer = getattr(module, name)
        copies = head_copies if place and len(region.columns) == 3 else 1
        if isinstance(layer, Conv1D):
            cut(layer, "weight", dim=1, fused=region.fused)
            layer.nf //= axis.size
        else:
            cut(layer, "weight", dim=0, fused=region.fused, copies=copies)
            layer.out_features //= axis.size // copies
        for parameter in ("bias", LORA_B, MAGNITUDE):
            if getattr(layer, parameter, None) is not None:
                cut(layer, parameter, dim=0, fused=region.fused, copies=copies)
    row = getattr(module, region.row)
    if isinstance(row, LoraLayer):
        cut(row, LORA_A, dim=1)
    # Change the class in place, so that the parameter keeps its place.
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
    for name, copies in zip(region.across_heads, norm_copies, strict=False):
        _norm_across_ranks(getattr(module, name), axis, copies)
    if head_copies > 1:
        module.num_key_value_groups //= head_copies
    if region.is_uneven:
        _choose_own_heads(module, region, axis)
    enter = GatherToRegion if sequence_sharded else Copy
    module.register_forward_pre_hook(_on_hidden_states(enter, axis), with_kwargs=True)


def shard_experts(module: Any, region: Region, axis: Axis, cut: Any) -> None:
    """Give every rank a part of each expert: rows of gate and up, columns of down.

    The router lies outside and is the same on all ranks. So is its gradient, since the gradient
    of the routing weights is summed over the ranks.
    """
    gives_last = getattr(module, "is_transposed", False)
    for name in region.columns:
        is_bias = getattr(module, name).dim() == 2
        cut(module, name, dim=2 if gives_last and not is_bias else 1, fused=region.fused)
        if hasattr(module, f"{name}_{LORA_B}"):
            cut(module, f"{name}_{LORA_B}", dim=1, fused=region.fused)
    cut(module, region.row, dim=1 if gives_last else 2)
    if hasattr(module, f"{region.row}_{LORA_A}"):
        cut(module, f"{region.row}_{LORA_A}", dim=2)
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


def _copies_of_heads(module: Any, axis: Axis) -> int:
    """Return the number of tensor ranks that share a key-value head."""
    groups = getattr(module, "num_key_value_groups", 1)
    return 1 if groups == 1 else max(1, axis.size * groups // module.config.num_attention_heads)


def _norm_across_ranks(norm: nn.Module, axis: Axis, copies: int) -> None:
    """Let a norm over all heads see all ranks' heads; each rank keeps its own of the result.

    Args:
        copies: Number of neighbouring ranks with the same heads.
    """
    count, index = axis.size // copies, axis.index // copies

    def gather(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        gathered = GatherWidth.apply(args[0], axis).unflatten(-1, (count, copies, -1))
        return (gathered[..., 0, :].flatten(-2), *args[1:])

    norm.register_forward_pre_hook(gather)
    norm.register_forward_hook(
        lambda _, args, output: output.chunk(count, dim=-1)[index].contiguous()
    )


def _choose_own_heads(module: Any, region: Region, axis: Axis) -> None:
    """Exchange the outputs of a fused projection so that each rank gets its own heads.

    Queries, keys and values have unequal widths, so equal parts of the matrix are not whole
    heads. The matrix stays cut in equal parts, and its outputs are exchanged.
    """
    config = copy.copy(module.config)
    queries = config.num_attention_heads * module.head_dim
    keys = config.num_key_value_heads * module.head_dim
    copies = max(1, axis.size // config.num_key_value_heads)
    config.num_attention_heads //= axis.size
    config.num_key_value_heads //= axis.size // copies
    module.config, module.num_key_value_heads = config, config.num_key_value_heads

    def choose(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        query, *others = GatherWidth.apply(output, axis).split((queries, keys, keys), dim=-1)
        count, index = axis.size // copies, axis.index // copies
        own = (part.chunk(count, dim=-1)[index] for part in others)
        return torch.cat([query.chunk(axis.size, dim=-1)[axis.index], *own], dim=-1)

    getattr(module, region.columns[0]).register_forward_hook(choose)


def _on_hidden_states(function: Any, axis: Axis) -> Any:
    """Return a pre-hook that applies a function to the hidden states, however they are passed."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (function.apply(args[0], axis), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": function.apply(kwargs["hidden_states"], axis)}

    return hook


class _CrossEntropy(torch.autograd.Function):
    """Cross entropy with a softmax over all ranks, and its log-normalisers.

    Their gradients are softmax minus one-hot, and softmax.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, vocabulary: Vocabulary, ignored: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        axis = vocabulary.axis
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=axis.group)
        exponentials = (logits - largest[..., None]).exp_()
        total = all_reduce(exponentials.sum(dim=-1), axis)
        local = labels - vocabulary.first
        other = (local < 0) | (local >= vocabulary.count)
        local = local.masked_fill(other, 0)[..., None]
        target = logits.gather(-1, local).squeeze(-1).masked_fill(other, 0.0)
        normalisers = total.log() + largest
        losses = normalisers - all_reduce(target, axis)
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
