"""Tensors of a decoder, exactly, from its published shape: no torch, no checkpoint.

Names are transformers' names; a test compares them with transformers' own models on the meta
device. A directory whose architecture has no closed form brings its anatomy
(`trainctl.models.anatomy`, read from its own code), which replaces the closed form everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
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
    sharded: bool = True
    """Whether tensor parallelism splits the tensor. Norms, position embeddings and the biases of
    row-parallel layers are replicated on every rank instead.
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


def key_value_heads(model: ModelConfig) -> int:
    """Return the number of key-value heads."""
    if spec_of(model).has_equal_heads:
        return model.num_attention_heads
    return model.num_key_value_heads or model.num_attention_heads


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


def tensor_units(model: ModelConfig) -> dict[str, int]:
    """Return the counts that the tensor-parallel size must divide, by config key or description."""
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
    rows, spec = ((model.vocab_size, True), (model.max_position_embeddings, False)), spec_of(model)
    return tuple(
        TensorShape(
            name=f"{spec.decoder}.{module}.weight",
            shape=(count, model.hidden_size),
            sharded=sharded,
            embedding=True,
        )
        for module, (count, sharded) in zip(spec.embeddings, rows, strict=False)
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
        return TensorShape(name=f"{SCORE}.weight", shape=shape, sharded=False)
    name = f"{spec_of(model).head}.weight"
    return TensorShape(name=name, shape=(model.vocab_size, model.hidden_size))


def future_tensors(model: ModelConfig) -> Iterator[TensorShape]:
    """Yield the tensors of the blocks that predict further tokens, as transformers' `MtpLayer` has
    them: two norms, the projection of hidden state and embedding, a decoder block, a norm.
    """
    spec, width = spec_of(model), model.hidden_size
    for index in range(model.future_blocks or 0):
        prefix = f"{FUTURE}.{index}"
        for name in ("enorm", "hnorm"):
            yield from _norm_tensors(f"{prefix}.{name}", width, spec)
        yield TensorShape(name=f"{prefix}.eh_proj.weight", shape=(width, 2 * width), sharded=False)
        for tensor in block_tensors(model):
            yield TensorShape(
                name=f"{prefix}.mtp_block.{tensor.name}", shape=tensor.shape, sharded=False
            )
        yield from _norm_tensors(f"{prefix}.post_norm", width, spec)


def block_of(name: str) -> int | None:
    """Return the index of the block that a canonical name belongs to; None outside blocks."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def all_tensors(model: ModelConfig) -> Iterator[TensorShape]:
    """Yield every tensor of the model under its canonical name; a tied tensor once."""
    read = anatomy(model)
    if read is not None:
        for parameter in read.parameters:
            yield TensorShape(
                name=parameter.name,
                shape=parameter.shape,
                sharded=parameter.shares > 0,
                embedding=parameter.role is Role.embedding,
            )
        return
    yield from embedding_tensors(model)
    prefix, block = block_prefix(model), block_tensors(model)
    for index in range(model.num_layers):
        for tensor in block:
            name = f"{prefix}.{index}.{tensor.name}"
            yield TensorShape(name=name, shape=tensor.shape, sharded=tensor.sharded)
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
    width, ffn = head_dim(model), model.intermediate_size
    queries, keys = model.num_attention_heads * width, key_value_heads(model) * width
    inside = {spec.attention: (queries, keys, keys), spec.feed_forward: (ffn, ffn)}
    for part in spec.block:
        if isinstance(part, Region):
            yield from _region_tensors(model, spec, part, inside[part])
        else:
            yield from _norm_tensors(part, model.hidden_size, spec)


def _region_tensors(
    model: ModelConfig, spec: Family, region: Region, widths: tuple[int, ...]
) -> Iterator[TensorShape]:
    """Yield the tensors of a region, given the output widths of its column-parallel matrices. The
    row matrix maps the first width back to the hidden size.
    """
    outputs = (sum(widths),) if region.fused > 1 else widths
    for name, width in zip(region.columns, outputs, strict=False):
        yield _matrix_tensors(f"{region.module}.{name}", width, model.hidden_size, spec)
        if region.column_bias:
            yield TensorShape(name=f"{region.module}.{name}.bias", shape=(width,))
    row = f"{region.module}.{region.row}"
    yield _matrix_tensors(row, model.hidden_size, widths[0], spec)
    if region.row_bias:
        yield TensorShape(name=f"{row}.bias", shape=(model.hidden_size,), sharded=False)
    for name in region.per_head:
        yield from _norm_tensors(f"{region.module}.{name}", head_dim(model), spec)


def _matrix_tensors(name: str, outputs: int, inputs: int, spec: Family) -> TensorShape:
    shape = (inputs, outputs) if spec.inputs_first else (outputs, inputs)
    return TensorShape(name=f"{name}.weight", shape=shape)


def _norm_tensors(name: str, width: int, spec: Family) -> Iterator[TensorShape]:
    for part in ("weight", "bias") if spec.norm.has_bias else ("weight",):
        yield TensorShape(name=f"{name}.{part}", shape=(width,), sharded=False)
