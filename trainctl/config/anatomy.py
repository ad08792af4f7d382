"""What a model is made of, without torch: tensors, blocks, experts, what attention multiplies.

Made once from transformers' own class (`trainctl.train.models.anatomy`), in a process of its own
(`trainctl.config.tracing`), and kept in the configuration as a short list of text
(`model.anatomy`): every count of a model without a closed form follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from trainctl.config.tensor_table import from_table, to_table
from trainctl.errors import TrainctlError


class Role(Enum):
    """What a parameter is for.

    A tied output projection is the embedding; an expert's bias is the expert's.
    """

    embedding = "embedding"
    head = "head"
    norm = "norm"
    bias = "bias"
    router = "router"
    expert = "expert"
    shared = "shared"
    weight = "weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter tensor."""

    name: str
    """Canonical name: transformers' own."""
    shape: tuple[int, ...]
    role: Role
    """What it is for."""
    block: int | None = None
    """Number of its block; None is outside of them."""
    shares: int = 0
    """Equal parts that tensor ranks may divide among themselves: heads, or columns of a
    feed-forward layer; 0 where each rank has all of it."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Also of all experts in one tensor."""
        return self.name.endswith("bias")


ROUTER_BIAS = "e_score_correction_bias"
"""Name of what routers choose by besides their scores (DeepSeek-V3 and what follows it): updates
move it, and no gradient does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBuffer:
    """A tensor that is saved and has no gradient, such as the bias of a router."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """What one attention multiplies, for each token."""

    heads: int
    key_width: int
    """Width of a query and a key; with latent attention, of what scores are made of."""
    value_width: int
    """Width of a value."""
    window: int | None = None
    """Tokens that one attends to; None attends to everything."""

    def products(self, sequence_length: int) -> int:
        """Multiplications for one token: its scores, and the weighted sum of values."""
        keys = min(sequence_length, self.window or sequence_length)
        return self.heads * (self.key_width + self.value_width) * keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A decoder block."""

    name: str
    """Name of the module."""
    kind: int
    """Blocks of one kind are made equal, and do the same."""
    experts: int = 0
    """Experts that a token chooses from; 0 in a dense block."""
    experts_per_token: int = 0
    """Those that it goes to."""
    attention: tuple[Attention, ...] = ()
    """What its attention multiplies; more than one in unusual architectures."""

    @property
    def active_share(self) -> float:
        """The share of its experts' elements that one token meets."""
        return self.experts_per_token / self.experts if self.experts else 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Anatomy:
    """A causal language model of transformers. One of two equal ones is not the other: they are
    keys of caches.
    """

    parameters: tuple[Parameter, ...]
    """Tied ones once, in the model's order."""
    blocks: tuple[Block, ...]
    """Decoder blocks, in order."""
    ties: tuple[tuple[str, str], ...] = ()
    """Names that are another parameter, and which."""
    buffers: tuple[SavedBuffer, ...] = ()
    attentions: tuple[str, ...] = field(default=("eager",))
    """What `model.attention` may be, as transformers' class says."""
    is_recurrent: bool = False
    """Whether a state is carried from token to token, besides keys and values."""
    turns_by_length: bool = False
    """Whether rotary embeddings depend on the largest position that there is."""
    has_experts_apart: bool = False
    """Whether a layer's experts are multiplied by the model's own code, and not by the function
    that transformers calls for experts joined to one parameter."""
    has_routers_apart: bool = False
    """Whether a layer's experts have no router beside them that is known by its form: what it
    decides is not seen."""
    drawn_whole: str = ""
    """The first parameter that starts by what cannot be done for a part of it, if any does: a run
    cannot draw its first weights."""
    code: str = ""
    """Digest of the user's files that made it (`model.factory`); empty of a directory's."""

    @cached_property
    def total(self) -> int:
        """Parameters in all."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def expert_parameters(self) -> int:
        """Those that only some tokens meet: experts with their biases, and no shared ones."""
        return self.numel(Role.expert)

    @cached_property
    def active(self) -> int:
        """Parameters that one token meets: all but the experts that it does not go to.

        So Mixtral and Qwen3 are published. gpt-oss leaves out the embedding, of which a token
        reads one row; take `numel(Role.embedding)` off.
        """
        return round(sum(p.numel * self.active_share(p) for p in self.parameters))

    @cached_property
    def multiplied(self) -> int:
        """Weights that one token is multiplied with: matrices, with the head also where it is tied.

        Looking up an embedding multiplies nothing; norms and biases are left out.
        """
        inside = sum(
            parameter.numel * self.active_share(parameter)
            for parameter in self.parameters
            if len(parameter.shape) > 1
            and not parameter.is_bias
            and parameter.role is not Role.embedding
        )
        return round(inside) + (self.head if self.has_tied_head else 0)

    @property
    def embedding(self) -> int:
        """Elements of the token embedding."""
        return next((p.numel for p in self.parameters if p.role is Role.embedding), 0)

    @property
    def head(self) -> int:
        """Elements of the output projection, tied or not."""
        return self.numel(Role.head) or self.embedding

    @property
    def has_tied_head(self) -> bool:
        return not self.numel(Role.head)

    @property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    @property
    def has_biased_routers(self) -> bool:
        """Whether every router has a bias that its choice follows."""
        routers = {p.name.rpartition(".")[0] for p in self.parameters if p.role is Role.router}
        names = {p.name for p in self.parameters} | {b.name for b in self.buffers}
        biased = [router for router in routers if f"{router}.{ROUTER_BIAS}" in names]
        return len(biased) == sum(block.experts > 0 for block in self.blocks)

    def numel(self, role: Role) -> int:
        """Return elements of the parameters of a role."""
        return sum(parameter.numel for parameter in self.parameters if parameter.role is role)

    def active_share(self, parameter: Parameter) -> float:
        """Return the share of a parameter's elements that one token meets."""
        if parameter.role is not Role.expert or parameter.block is None:
            return 1.0
        return self.blocks[parameter.block].active_share

    def attention_products(self, sequence_length: int) -> int:
        """Multiplications of attention for one token, in all blocks."""
        return sum(
            attention.products(sequence_length)
            for block in self.blocks
            for attention in block.attention
        )

    def to_table(self) -> list[str]:
        """As the configuration keeps it."""
        return to_table(self._entries())

    def _entries(self) -> Iterator[tuple[str, str]]:
        yield "model", " ".join(["supports", *self.attentions])
        yield from (("model", word) for word, name in _TRAITS.items() if getattr(self, name))
        if self.drawn_whole:
            yield self.drawn_whole, "drawn-whole"
        if self.code:
            yield "model", f"code {self.code}"
        for parameter in self.parameters:
            words = [_sizes(parameter.shape), parameter.role.value]
            words += [f"shares={parameter.shares}"] if parameter.shares else []
            yield parameter.name, " ".join(words)
        for name, of in self.ties:
            yield name, f"tied {of}"
        for buffer in self.buffers:
            yield buffer.name, f"{_sizes(buffer.shape)} buffer"
        for block in self.blocks:
            words = ["block", str(block.kind)]
            if block.experts:
                words.append(f"experts={block.experts}/{block.experts_per_token}")
            for each in block.attention:
                window = f"@{each.window}" if each.window else ""
                words.append(f"attention={each.heads}x{each.key_width}x{each.value_width}{window}")
            yield block.name, " ".join(words)


_TENSOR = re.compile(r"(\d+(?:x\d+)*|scalar) (\w+)(?: shares=(\d+))?")
_BLOCK = re.compile(r"block (\d+)(?: experts=(\d+)/(\d+))?((?: attention=\d+x\d+x\d+(?:@\d+)?)*)")
_TRAITS = {
    "recurrent": "is_recurrent",
    "turns-by-length": "turns_by_length",
    "experts-apart": "has_experts_apart",
    "routers-apart": "has_routers_apart",
}
"""What is said of the model as a whole: the word, and its field."""
_ATTENTION = re.compile(r"(\d+)x(\d+)x(\d+)(?:@(\d+))?")


def anatomy_of(table: Sequence[str]) -> Anatomy:
    """Return the anatomy that a configuration keeps.

    Raises:
        TrainctlError: An entry is none.
    """
    return _read(tuple(table))


def experts_in(table: Sequence[str]) -> dict[str, int | None]:
    """Experts of a sparse block, and those that a token goes to, by the configuration's keys.

    The code says so: a file may leave a default out, call them otherwise, or have them unused.
    """
    blocks = anatomy_of(table).blocks
    most = max(blocks, key=lambda block: block.experts, default=None)
    return {
        "num_experts": (most.experts or None) if most else None,
        "experts_per_token": (most.experts_per_token or None) if most else None,
    }


def shape_in(table: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of a model by the configuration's keys, as far as its tensors show them."""
    read = anatomy_of(table)
    matrices = {p.role: p.shape for p in reversed(read.parameters) if len(p.shape) == 2}
    rows, width = matrices.get(Role.head) or matrices[Role.embedding]
    found: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": width,
        "num_layers": len(read.blocks),
        "tie_word_embeddings": read.has_tied_head,
        **experts_in(table),
    }
    if read.blocks[0].attention:
        first = read.blocks[0].attention[0]
        found |= {"num_attention_heads": first.heads, "head_dim": first.key_width}
    return found


@lru_cache(maxsize=8)
def _read(table: tuple[str, ...]) -> Anatomy:
    entries = from_table(table)
    blocks = [_block(name, said) for name, said in entries if said.startswith("block ")]
    numbers = {block.name: number for number, block in enumerate(blocks)}
    parameters: list[Parameter] = []
    buffers: list[SavedBuffer] = []
    ties: list[tuple[str, str]] = []
    attentions: tuple[str, ...] = ()
    drawn_whole = code = ""
    traits = set()
    for name, said in entries:
        kind, *words = said.split()
        if kind == "supports":
            attentions = tuple(words)
        elif kind in _TRAITS:
            traits.add(kind)
        elif kind == "drawn-whole":
            drawn_whole = name
        elif kind == "code":
            code = words[0]
        elif kind == "tied":
            ties.append((name, words[0]))
        elif kind != "block":
            tensor = _tensor(name, said, numbers)
            if isinstance(tensor, SavedBuffer):
                buffers.append(tensor)
            else:
                parameters.append(tensor)
    return Anatomy(
        parameters=tuple(parameters),
        blocks=tuple(blocks),
        ties=tuple(ties),
        buffers=tuple(buffers),
        attentions=attentions,
        drawn_whole=drawn_whole,
        code=code,
        is_recurrent="recurrent" in traits,
        turns_by_length="turns-by-length" in traits,
        has_experts_apart="experts-apart" in traits,
        has_routers_apart="routers-apart" in traits,
    )


def _tensor(name: str, said: str, blocks: dict[str, int]) -> Parameter | SavedBuffer:
    found = _TENSOR.fullmatch(said)
    if found is None or found[2] not in {"buffer", *(role.value for role in Role)}:
        raise _no_entry(name, said)
    sizes, role, shares = found.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    if role == "buffer":
        return SavedBuffer(name=name, shape=shape)
    return Parameter(
        name=name,
        shape=shape,
        role=Role(role),
        block=block_of(name, blocks),
        shares=int(shares or 0),
    )


def block_of(name: str, blocks: dict[str, int]) -> int | None:
    """Return number of the block that a name belongs to.

    Args:
        blocks: Number of each block, by the name of its module.
    """
    ends = (match.start() for match in re.finditer(r"\.", name))
    return next((blocks[name[:end]] for end in ends if name[:end] in blocks), None)


def _block(name: str, said: str) -> Block:
    found = _BLOCK.fullmatch(said)
    if found is None:
        raise _no_entry(name, said)
    kind, experts, chosen, attention = found.groups()
    return Block(
        name=name,
        kind=int(kind),
        experts=int(experts or 0),
        experts_per_token=int(chosen or 0),
        attention=tuple(
            Attention(int(heads), int(keys), int(values), int(window) if window else None)
            for heads, keys, values, window in _ATTENTION.findall(attention)
        ),
    )


def _no_entry(name: str, said: str) -> TrainctlError:
    return TrainctlError(f"model.anatomy: {name} cannot be {said!r}")


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
