"""The tensors of a decoder, exactly, from its published shape: no torch, no checkpoint.

Names are those of transformers, so a test compares them one by one with transformers' own models
on the meta device. A directory whose architecture has no closed form brings a table of its tensors
(`model.tensors`, traced from its own code); without one it is a Llama with other positions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from trainctl.config.schema import ModelConfig, ModelFamily
from trainctl.config.tensor_table import from_table

LOOKUPS = ("wte", "wpe", "embeddings")
"""Names of modules that are looked up by token or position, besides those with `embed` in them."""

EXPERT = ".experts."
"""Part of the names of what only some tokens go through."""

_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks|layer)\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """One parameter tensor.

    Attributes:
        name: Name in transformers; for a block relative to it (``self_attn.q_proj.weight``).
        shape: Its sizes.
        sharded: Whether tensor parallelism splits it; norms, position embeddings and the biases
            of row-parallel layers are copied to every rank instead.
        embedding: Whether it is looked up by token or position.
    """

    name: str
    shape: tuple[int, ...]
    sharded: bool = True
    embedding: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCount:
    """Parameters of a whole model, tied weights counted once.

    Attributes:
        embeddings: Token and learned position embeddings.
        block: One decoder block.
        blocks: All of them.
        final_norm: The norm before the output projection.
        head: The output projection; 0 when it is tied to the embedding.
        tensors: Number of parameter tensors.
    """

    embeddings: int
    block: int
    blocks: int
    final_norm: int
    head: int
    tensors: int

    @property
    def total(self) -> int:
        return self.embeddings + self.blocks + self.final_norm + self.head


def head_dim(model: ModelConfig) -> int:
    """Width of an attention head."""
    return model.head_dim or model.hidden_size // model.num_attention_heads


def key_value_heads(model: ModelConfig) -> int:
    """Key and value heads; GPT-2 has one for each query head."""
    if model.family is ModelFamily.gpt2:
        return model.num_attention_heads
    return model.num_key_value_heads or model.num_attention_heads


def embedding_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """What stands before the first block."""
    vocabulary = (model.vocab_size, model.hidden_size)
    if model.family is not ModelFamily.gpt2:
        return (TensorShape(name="model.embed_tokens.weight", shape=vocabulary, embedding=True),)
    positions = (model.max_position_embeddings, model.hidden_size)
    return (
        TensorShape(name="transformer.wte.weight", shape=vocabulary, embedding=True),
        TensorShape(name="transformer.wpe.weight", shape=positions, sharded=False, embedding=True),
    )


def block_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """The tensors of one block."""
    return tuple(_gpt2_block(model) if model.family is ModelFamily.gpt2 else _llama_block(model))


def block_prefix(model: ModelConfig) -> str:
    """Name of the list of blocks in transformers."""
    return "transformer.h" if model.family is ModelFamily.gpt2 else "model.layers"


def final_norm_tensors(model: ModelConfig) -> tuple[TensorShape, ...]:
    """The norm after the last block."""
    if model.family is ModelFamily.gpt2:
        return tuple(_vectors("transformer.ln_f", model.hidden_size))
    return (_norm("model.norm", model.hidden_size),)


def head_tensor(model: ModelConfig) -> TensorShape:
    """The output projection; the same tensor as the embedding when tied."""
    return TensorShape(name="lm_head.weight", shape=(model.vocab_size, model.hidden_size))


def block_of(name: str) -> int | None:
    """Index of the block that a canonical name belongs to, if any."""
    found = _BLOCK.search(name)
    return int(found[1]) if found else None


def all_tensors(model: ModelConfig) -> Iterator[TensorShape]:
    """Every tensor of the model under its canonical name; a tied one once."""
    if model.tensors:
        for name, shape in from_table(model.tensors):
            yield TensorShape(name=name, shape=shape, embedding=_is_lookup(name))
        return
    yield from embedding_tensors(model)
    prefix = block_prefix(model)
    for index in range(model.num_layers):
        for tensor in block_tensors(model):
            name = f"{prefix}.{index}.{tensor.name}"
            yield TensorShape(name=name, shape=tensor.shape, sharded=tensor.sharded)
    yield from final_norm_tensors(model)
    if not model.tie_word_embeddings:
        yield head_tensor(model)


def _is_lookup(name: str) -> bool:
    module = name.rpartition(".")[0].rpartition(".")[2]
    return "embed" in module or module in LOOKUPS


def active_share(model: ModelConfig, name: str) -> float:
    """The share of a tensor's elements that one token meets: of experts, those that it goes to."""
    if EXPERT not in name or not model.num_experts or not model.experts_per_token:
        return 1.0
    return model.experts_per_token / model.num_experts


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact parameter counts of the whole model."""
    if model.tensors:
        return _count_table(model)
    embeddings, block = embedding_tensors(model), block_tensors(model)
    final = final_norm_tensors(model)
    block_numel = sum(tensor.numel for tensor in block)
    tied = model.tie_word_embeddings
    return ParameterCount(
        embeddings=sum(tensor.numel for tensor in embeddings),
        block=block_numel,
        blocks=block_numel * model.num_layers,
        final_norm=sum(tensor.numel for tensor in final),
        head=0 if tied else head_tensor(model).numel,
        tensors=len(embeddings) + len(block) * model.num_layers + len(final) + (not tied),
    )


def _count_table(model: ModelConfig) -> ParameterCount:
    """The counts of a model that is traced; its block is the largest of them."""
    tensors = tuple(all_tensors(model))
    blocks: dict[int, int] = {}
    outside = {"embeddings": 0, "head": 0, "final_norm": 0}
    for tensor in tensors:
        index = block_of(tensor.name)
        if index is not None:
            blocks[index] = blocks.get(index, 0) + tensor.numel
        elif tensor.embedding:
            outside["embeddings"] += tensor.numel
        else:
            outside["head" if tensor.is_matrix else "final_norm"] += tensor.numel
    return ParameterCount(
        block=max(blocks.values(), default=0),
        blocks=sum(blocks.values()),
        tensors=len(tensors),
        **outside,
    )


def _llama_block(model: ModelConfig) -> Iterator[TensorShape]:
    hidden, ffn, width = model.hidden_size, model.intermediate_size, head_dim(model)
    queries, keys = model.num_attention_heads * width, key_value_heads(model) * width
    matrices = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    for name, shape in matrices.items():
        yield TensorShape(name=f"{name}.weight", shape=shape)
    if model.family is ModelFamily.qwen3:
        yield _norm("self_attn.q_norm", width)
        yield _norm("self_attn.k_norm", width)
    yield _norm("input_layernorm", hidden)
    yield _norm("post_attention_layernorm", hidden)


def _gpt2_block(model: ModelConfig) -> Iterator[TensorShape]:
    hidden, ffn = model.hidden_size, model.intermediate_size
    yield from _vectors("ln_1", hidden)
    yield TensorShape(name="attn.c_attn.weight", shape=(hidden, 3 * hidden))
    yield TensorShape(name="attn.c_attn.bias", shape=(3 * hidden,))
    yield TensorShape(name="attn.c_proj.weight", shape=(hidden, hidden))
    yield TensorShape(name="attn.c_proj.bias", shape=(hidden,), sharded=False)
    yield from _vectors("ln_2", hidden)
    yield TensorShape(name="mlp.c_fc.weight", shape=(hidden, ffn))
    yield TensorShape(name="mlp.c_fc.bias", shape=(ffn,))
    yield TensorShape(name="mlp.c_proj.weight", shape=(ffn, hidden))
    yield TensorShape(name="mlp.c_proj.bias", shape=(hidden,), sharded=False)


def _norm(name: str, width: int) -> TensorShape:
    return TensorShape(name=f"{name}.weight", shape=(width,), sharded=False)


def _vectors(name: str, width: int) -> Iterator[TensorShape]:
    yield _norm(name, width)
    yield TensorShape(name=f"{name}.bias", shape=(width,), sharded=False)
