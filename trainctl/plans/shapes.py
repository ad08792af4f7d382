"""Tensors of a decoder, exactly, from its published shape: no torch, no checkpoint.

Names are transformers' names; a test compares them with transformers' own models on the meta
device. A directory whose architecture has no closed form brings its anatomy
(`trainctl.models.anatomy`, read from its own code), which replaces the closed form everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from trainctl.config.schema import ModelConfig
from trainctl.errors import TrainctlError
from trainctl.models.anatomy import Anatomy, Role, parse_anatomy
from trainctl.models.tensors import FUTURE, SCORE
from trainctl.options.model import Family, Region, spec_of

FEED_FORWARD = ("mlp", "ffn", "feed_forward")
"""Names that architectures give to the feed-forward layer of a block."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Name and shape of one parameter tensor."""

    name: str
    """Name in transformers; for a tensor of a block, relative to the block
    (``self_attn.q_proj.weight``).
    """
    shape: tuple[int, ...]
    shares: int = 0
    """Number of equal parts that tensor-parallel ranks can divide: heads, columns of a feed-forward
    layer, tokens. 0 if every rank has the whole tensor: norms, position embeddings, biases of
    row-parallel layers.
    """
    embedding: bool = False
    """Whether the tensor is a lookup table by token or position."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameter counts of a whole model, tied weights counted once."""

    embeddings: int
    """Parameters of token and learned position embeddings."""
    block: int
    blocks: int
    final_norm: int
    """Parameters of the norm before the output projection."""
    head: int
    """Parameters of the output projection; 0 if tied to the embedding."""
    tensors: int
    """Number of parameter tensors."""

    @property
    def total(self) -> int:
        return self.embeddings + self.blocks + self.final_norm + self.head


def head_dim(model: ModelConfig) -> int:
    """Return the width of an attention head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def attended_width(model: ModelConfig) -> int:
    """Return the width of a head's queries and keys in attention, which ranks exchange. Latent
    attention's is more than its projections suggest; narrower values are padded to it.
    """
    read = None if model.is_unread else anatomy(model)
    widths = [a.key_width for block in read.blocks for a in block.attention] if read else []
    return max(widths, default=head_dim(model))


def key_value_heads(model: ModelConfig) -> int:
    """Return the number of key-value heads."""
    if spec_of(model).has_equal_heads:
        return model.num_attention_heads
    return model.num_key_value_heads or model.num_attention_heads


def own_key_value_heads(model: ModelConfig, tensor: int) -> float:
    """Return the number of key-value heads of one of `tensor` ranks; ranks share no half heads."""
    return max(key_value_heads(model) / tensor, 1)


def attention_window(model: ModelConfig) -> int | None:
    """Return the number of tokens that a token attends to; None for no window."""
    return model.sliding_window if spec_of(model).has_window else None


def anatomy(model: ModelConfig) -> Anatomy | None:
    """Return the anatomy of a model built by its own code; None for a family with a closed form.

    Raises:
        TrainctlError: The model has not been read; no other family is substituted.
    """
    if model.has_closed_form:
        return None
    if model.is_unread:
        raise TrainctlError(
            f"nothing is known of the tensors of {model.name}",
            hint="a run of an older version does not have it: start another from its weights, with "
            "model.path as before and model.initial_weights=RUN",
        )
    return parse_anatomy(model.anatomy)


def is_encoder(model: ModelConfig) -> bool:
    """Whether the model is an encoder: its tokens attend to later tokens too."""
    read = None if model.is_unread else anatomy(model)
    return read is not None and read.is_encoder


def undecayed(model: ModelConfig) -> frozenset[str]:
    """Return the names of the parameters that the model's own code keeps from weight decay."""
    read = None if model.is_unread else anatomy(model)
    return frozenset() if read is None else read.undecayed


def repeated_heads(model: ModelConfig, tensor: int) -> int:
    """Return the number of tensor ranks that hold the same key-value head; 1 if these do not divide
    the ranks.
    """
    heads = key_value_heads(model)
    return 1 if heads == model.num_attention_heads or tensor % heads else tensor // heads


def undivided_units(model: ModelConfig, tensor: int, *, repeats: bool = True) -> dict[str, int]:
    """Return the counts that `tensor` ranks cannot share, by config key or description.

    Args:
        repeats: Whether a key-value head may be on several ranks.
    """
    repeats = repeats and repeated_heads(model, tensor) > 1
    return {
        key: count
        for key, count in _tensor_units(model).items()
        if count % tensor and not (repeats and count == key_value_heads(model))
    }


def _tensor_units(model: ModelConfig) -> dict[str, int]:
    """Return the counts that tensor ranks share, by config key or description."""
    read = None if model.is_unread else anatomy(model)
    if read is None:
        return {
            "model.num_attention_heads": model.num_attention_heads,
            "model.num_key_value_heads": key_value_heads(model),
            "model.intermediate_size": model.intermediate_size,
        }
    vocabulary = (Role.embedding, Role.head)  # need not divide: the last rank may have less
    inside = [p for p in read.parameters if p.shares and p.role not in vocabulary]
    # One parameter per number of units is enough; the first is the easiest to find.
    first = {p.shares: p.name for p in reversed(inside)}
    return {f"the units of {name}": shares for shares, name in first.items()}


def embedding_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """Return the embedding tensors before the first block."""
    # Tensor parallelism splits the rows of the token embedding, not those of positions.
    rows, spec = ((model.vocab_size,) * 2, (model.max_position_embeddings, 0)), spec_of(model)
    return tuple(
        TensorShape(
            name=f"{spec.decoder}.{module}.weight",
            shape=(count, model.hidden_size),
            shares=shares,
            embedding=True,
        )
        for module, (count, shares) in zip(spec.embeddings, rows, strict=False)
    )


def block_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """Return the tensors of one block, in transformers' order."""
    return tuple(_block_tensors(model, spec_of(model)))


def block_prefix(model: ModelConfig) -> str:
    """Return the name of the list of blocks in transformers."""
    spec = spec_of(model)
    return f"{spec.decoder}.{spec.blocks}"


def final_norm_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """Return the tensors of the norm after the last block."""
    spec = spec_of(model)
    return tuple(_norm_tensors(f"{spec.decoder}.{spec.final_norm}", model.hidden_size, spec))


def head_tensor(model: ModelConfig) -> TensorShape:
    """Return the output projection, the same tensor as the embedding if tied; or the head `score`,
    which every tensor rank has whole.
    """
    if model.score_outputs is not None:
        shape = (model.score_outputs, model.hidden_size)
        return TensorShape(name=f"{SCORE}.weight", shape=shape)
    name = f"{spec_of(model).head}.weight"
    shape = (model.vocab_size, model.hidden_size)
    return TensorShape(name=name, shape=shape, shares=model.vocab_size)


def future_tensors(model: ModelConfig) -> Iterator[TensorShape]:
    """Yield the tensors of the blocks that predict further tokens, as transformers' `MtpLayer` has
    them: two norms, the projection of hidden state and embedding, a decoder block, a norm.
    """
    spec, width = spec_of(model), model.hidden_size
    for index in range(model.future_blocks or 0):
        prefix = f"{FUTURE}.{index}"
        for name in ("enorm", "hnorm"):
            yield from _norm_tensors(f"{prefix}.{name}", width, spec)
        yield TensorShape(name=f"{prefix}.eh_proj.weight", shape=(width, 2 * width))
        for tensor in block_tensors(model):
            yield TensorShape(name=f"{prefix}.mtp_block.{tensor.name}", shape=tensor.shape)
        yield from _norm_tensors(f"{prefix}.post_norm", width, spec)


def block_of(name: str) -> int | None:
    """Return the index of the block that a canonical name belongs to; None outside blocks."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


@lru_cache(maxsize=4096)
def without_block(name: str) -> str:
    """Return a canonical name without the index of its block, the same for all blocks."""
    return _BLOCK.sub("", name, count=1)


def all_tensors(model: ModelConfig) -> Iterator[TensorShape]:
    """Yield every tensor of the model under its canonical name; a tied tensor once."""
    read = anatomy(model)
    if read is not None:
        for parameter in read.parameters:
            yield TensorShape(
                name=parameter.name,
                shape=parameter.shape,
                shares=parameter.shares,
                embedding=parameter.role is Role.embedding,
            )
        return
    yield from embedding_tensors(model)
    prefix, block = block_prefix(model), block_tensors(model)
    for index in range(model.num_layers):
        for tensor in block:
            name = f"{prefix}.{index}.{tensor.name}"
            yield TensorShape(name=name, shape=tensor.shape, shares=tensor.shares)
    yield from final_norm_tensors(model)
    if not model.has_tied_head:
        yield head_tensor(model)
    yield from future_tensors(model)


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Return the exact parameter counts of the whole model."""
    read = anatomy(model)
    if read is not None:
        return _count_from_anatomy(read)
    embeddings, block = embedding_tensors(model), block_tensors(model)
    final = final_norm_tensors(model)
    block_numel = sum(tensor.numel for tensor in block)
    tied, future = model.has_tied_head, tuple(future_tensors(model))
    return ParameterCount(
        embeddings=sum(tensor.numel for tensor in embeddings),
        block=block_numel,
        blocks=block_numel * model.num_layers + sum(tensor.numel for tensor in future),
        final_norm=sum(tensor.numel for tensor in final),
        head=0 if tied else head_tensor(model).numel,
        tensors=len(embeddings)
        + len(block) * model.num_layers
        + len(final)
        + (not tied)
        + len(future),
    )


def _count_from_anatomy(read: Anatomy) -> ParameterCount:
    """Return the parameter counts of an anatomy; `block` is its largest block."""
    blocks = [0] * len(read.blocks)
    for parameter in read.parameters:
        if parameter.block is not None:
            blocks[parameter.block] += parameter.numel
    embeddings, head = read.numel(Role.embedding), read.numel(Role.head)
    return ParameterCount(
        embeddings=embeddings,
        block=max(blocks),
        blocks=sum(blocks),
        final_norm=read.total - sum(blocks) - embeddings - head,
        head=head,
        tensors=len(read.parameters),
    )


def _block_tensors(model: ModelConfig, spec: Family) -> Iterator[TensorShape]:
    keys, ffn = key_value_heads(model), model.intermediate_size
    inside = {
        spec.attention: (head_dim(model), (model.num_attention_heads, keys, keys)),
        spec.feed_forward: (1, (ffn, ffn)),
    }
    for part in spec.block:
        if isinstance(part, Region):
            yield from _region_tensors(model, spec, part, *inside[part])
        else:
            yield from _norm_tensors(part, model.hidden_size, spec)


def _region_tensors(
    model: ModelConfig, spec: Family, region: Region, width: int, units: tuple[int, ...]
) -> Iterator[TensorShape]:
    """Yield the tensors of a region, given the numbers of units (heads or columns) of its
    column-parallel matrices, each `width` outputs wide. The row matrix maps the units of the first
    back to the hidden size.
    """
    columns = region.columns
    outputs = [sum(units)] * len(columns) if region.fused > 1 else units
    for name, count, shares in zip(columns, outputs, units, strict=False):
        shape = (count * width, model.hidden_size)
        yield _matrix_tensor(f"{region.module}.{name}", shape, shares, spec)
        if region.column_bias:
            yield TensorShape(
                name=f"{region.module}.{name}.bias", shape=(count * width,), shares=shares
            )
    row = f"{region.module}.{region.row}"
    yield _matrix_tensor(row, (model.hidden_size, units[0] * width), units[0], spec)
    if region.row_bias:
        yield TensorShape(name=f"{row}.bias", shape=(model.hidden_size,))
    for name in region.per_head:
        yield from _norm_tensors(f"{region.module}.{name}", head_dim(model), spec)


def _matrix_tensor(name: str, shape: tuple[int, int], shares: int, spec: Family) -> TensorShape:
    """Return a matrix of the shape (outputs, inputs), as the family stores it."""
    stored = shape[::-1] if spec.inputs_first else shape
    return TensorShape(name=f"{name}.weight", shape=stored, shares=shares)


def _norm_tensors(name: str, width: int, spec: Family) -> Iterator[TensorShape]:
    for part in ("weight", "bias") if spec.norm.has_bias else ("weight",):
        yield TensorShape(name=f"{name}.{part}", shape=(width,))
