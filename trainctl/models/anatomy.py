"""Anatomy of a model, without torch: tensors, blocks, experts, and the sizes of its attention.

It is made once from transformers' own class (`trainctl.train.models.anatomy`), in a child process
(`trainctl.models.tracing`). The configuration keeps it as a short list of strings
(`model.anatomy`). All counts of a model without a closed form are computed from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from trainctl.errors import TrainctlError
from trainctl.models.tensors import from_table, to_table


class Role(Enum):
    """Function of a parameter in the model.

    A tied output projection has the role `embedding`, an expert's bias the role `expert`.
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
    """Canonical name, as in transformers' state dict."""
    shape: tuple[int, ...]
    role: Role
    block: int | None = None
    """Index of its block; None outside all blocks."""
    shares: int = 0
    """Number of equal parts that tensor-parallel ranks can divide: heads, or columns of a
    feed-forward layer. 0 if every rank holds the whole parameter.
    """
    is_undecayed: bool = False
    """Whether the model's own code keeps it from weight decay."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_bias(self) -> bool:
        """Whether it is a bias, including one tensor with the biases of all experts."""
        return self.name.endswith("bias")


ROUTER_BIAS = "e_score_correction_bias"
"""Name of the bias that routers add to their scores to choose experts (DeepSeek-V3 and later). It
has no gradient: the balancing update moves it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedBuffer:
    """A saved tensor without a gradient, such as the bias of a router."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """Sizes of one attention layer, from which its multiplications per token follow."""

    heads: int
    key_width: int
    """Width of a query and a key per head; with latent attention, the width of the score
    products.
    """
    value_width: int
    """Width of a value per head."""
    window: int | None = None
    """Number of tokens that a token attends to, at most; None for all."""

    def products(self, sequence_length: int) -> int:
        """Return the multiplications for one token: its scores, and the weighted sum of values."""
        keys = min(sequence_length, self.window or sequence_length)
        return self.heads * (self.key_width + self.value_width) * keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A decoder block."""

    name: str
    """Name of its module."""
    kind: int
    """Number shared by all blocks with the same structure and computation."""
    experts: int = 0
    """Routed experts; 0 in a dense block."""
    experts_per_token: int = 0
    """Routed experts that compute each token (top-k)."""
    attention: tuple[Attention, ...] = ()
    """Attention layers of the block; more than one in unusual architectures."""

    @property
    def active_share(self) -> float:
        """Fraction of the experts' elements that one token activates."""
        return self.experts_per_token / self.experts if self.experts else 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Anatomy:
    """Structure of a language model of transformers.

    Instances compare by identity, because they are keys of caches.
    """

    parameters: tuple[Parameter, ...]
    """Parameters in the model's order; tied ones appear once."""
    blocks: tuple[Block, ...]
    """Decoder blocks, in order."""
    ties: tuple[tuple[str, str], ...] = ()
    """Pairs of an alias and the name of the parameter it is tied to."""
    buffers: tuple[SavedBuffer, ...] = ()
    attentions: tuple[str, ...] = field(default=("eager",))
    """Legal values of `model.attention`, as transformers' class declares them."""
    is_recurrent: bool = False
    """Whether the model carries a state from token to token, besides keys and values."""
    is_encoder: bool = False
    """Whether each token attends to the tokens after it too."""
    has_length_dependent_rope: bool = False
    """Whether rotary embeddings depend on the largest position of the sequence."""
    drops_attention: bool = False
    """Whether attention has dropout while training."""
    has_custom_expert_forward: bool = False
    """Whether the model's own code multiplies a layer's experts, and not the function that
    transformers calls for experts joined into one parameter.
    """
    has_unknown_routers: bool = False
    """Whether some sparse layer has no router of a known form, so that its routing is not
    visible.
    """
    has_inputs_first_experts: bool = False
    """Whether stacked experts have shape (experts, inputs, outputs), as gpt_oss's; others have the
    outputs before the inputs.
    """
    unsharded_init: str = ""
    """First parameter whose initialization cannot be computed for one shard alone; empty if there
    is none. With such a parameter a run cannot initialize its weights from the seed.
    """
    code: str = ""
    """Digest of the user's files that build the model (`model.factory`); empty for a directory."""
    flops: tuple[tuple[int, int], ...] = ()
    """Sequence lengths, rising, each with the floating point operations of a training step per
    token; linear in between and beyond. Empty for a model whose attention says them.
    """
    masks_documents: bool = True
    """Whether a module of the user's says that its code keeps packed documents apart."""
    joined_attentions: tuple[str, ...] = ()
    """Values of `model.attention` with which packed documents are not kept apart, as measured on a
    small model of its class, or with which no small model runs.
    """
    unsplit: tuple[tuple[str, str], ...] = ()
    """Axes of parallelism that cannot split a module of the user's by its own plans, with why."""

    @cached_property
    def total(self) -> int:
        """Number of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @cached_property
    def expert_parameters(self) -> int:
        """Number of parameters of routed experts, biases included. Shared experts do not count."""
        return self.numel(Role.expert)

    @cached_property
    def active(self) -> int:
        """Number of active parameters per token (experts that are not routed to excluded).

        The published numbers of Mixtral and Qwen3 count this way. gpt-oss also leaves out the
        embedding, since a token reads one row of it: subtract `numel(Role.embedding)`.
        """
        return round(sum(p.numel * self.active_share(p) for p in self.parameters))

    @cached_property
    def multiplied(self) -> int:
        """Number of weights that one token is multiplied with: active matrices, and a tied head.

        Embedding lookups multiply nothing; norms and biases are left out.
        """
        inside = sum(
            parameter.numel * self.active_share(parameter)
            for parameter in self.parameters
            if len(parameter.shape) > 1
            and not parameter.is_bias
            and parameter.role is not Role.embedding
        )
        return round(inside) + (self.head if self.has_tied_head else 0)

    @cached_property
    def block_numbers(self) -> dict[str, int]:
        """Index of the block of each parameter that is in one, by name."""
        return {p.name: p.block for p in self.parameters if p.block is not None}

    @cached_property
    def undecayed(self) -> frozenset[str]:
        """Names of the parameters that the model's own code keeps from weight decay."""
        return frozenset(each.name for each in self.parameters if each.is_undecayed)

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
        """Whether every router has a bias that takes part in its choice (`ROUTER_BIAS`)."""
        routers = {p.name.rpartition(".")[0] for p in self.parameters if p.role is Role.router}
        names = {p.name for p in self.parameters} | {b.name for b in self.buffers}
        biased = [router for router in routers if f"{router}.{ROUTER_BIAS}" in names]
        return len(biased) == sum(block.experts > 0 for block in self.blocks)

    def numel(self, role: Role) -> int:
        """Return the number of elements of all parameters with a role."""
        return sum(parameter.numel for parameter in self.parameters if parameter.role is role)

    def active_share(self, parameter: Parameter) -> float:
        """Return the fraction of a parameter's elements that one token activates."""
        if parameter.role is not Role.expert or parameter.block is None:
            return 1.0
        return self.blocks[parameter.block].active_share

    def attention_products(self, sequence_length: int) -> int:
        """Return the multiplications of attention for one token, summed over all blocks.

        With `flops`, all operations beyond the multiplied weights count as attention's.
        """
        if self.flops:
            return max(0, round(self._flops_at(sequence_length) / 6) - self.multiplied)
        return sum(
            attention.products(sequence_length)
            for block in self.blocks
            for attention in block.attention
        )

    def _flops_at(self, sequence_length: int) -> float:
        """Return the operations per token at a length, on the line through the nearest points."""
        if len(self.flops) == 1:
            return self.flops[0][1]
        right = next((i for i, (n, _) in enumerate(self.flops) if n >= sequence_length), -1)
        right = len(self.flops) - 1 if right < 0 else max(right, 1)
        (n, low), (m, high) = self.flops[right - 1 : right + 1]
        return low + (high - low) * (sequence_length - n) / (m - n)

    def to_table(self) -> list[str]:
        """Serialize to the list of strings in `model.anatomy`."""
        return to_table(self._entries())

    def _entries(self) -> Iterator[tuple[str, str]]:
        yield "model", " ".join(["supports", *self.attentions])
        if self.joined_attentions:
            yield "model", " ".join(["joins-documents", *self.joined_attentions])
        yield from (("model", word) for word, name in _TRAITS.items() if getattr(self, name))
        yield from (("model", word) for word, name in _LACKS.items() if not getattr(self, name))
        if self.unsharded_init:
            yield self.unsharded_init, "drawn-whole"
        if self.code:
            yield "model", f"code {self.code}"
        yield from (("model", f"unsplit {axis} {why}") for axis, why in self.unsplit)
        if self.flops:
            yield "model", " ".join(["flops", *(f"{n}:{count}" for n, count in self.flops)])
        for parameter in self.parameters:
            words = [_shape_text(parameter.shape), parameter.role.value]
            words += [f"shares={parameter.shares}"] if parameter.shares else []
            words += ["undecayed"] if parameter.is_undecayed else []
            yield parameter.name, " ".join(words)
        for name, of in self.ties:
            yield name, f"tied {of}"
        for buffer in self.buffers:
            yield buffer.name, f"{_shape_text(buffer.shape)} buffer"
        for block in self.blocks:
            words = ["block", str(block.kind)]
            if block.experts:
                words.append(f"experts={block.experts}/{block.experts_per_token}")
            for each in block.attention:
                window = f"@{each.window}" if each.window else ""
                words.append(f"attention={each.heads}x{each.key_width}x{each.value_width}{window}")
            yield block.name, " ".join(words)


_TENSOR = re.compile(r"(\d+(?:x\d+)*|scalar) (\w+)(?: shares=(\d+))?( undecayed)?")
_BLOCK = re.compile(r"block (\d+)(?: experts=(\d+)/(\d+))?((?: attention=\d+x\d+x\d+(?:@\d+)?)*)")
_TRAITS = {
    "recurrent": "is_recurrent",
    "encoder": "is_encoder",
    "turns-by-length": "has_length_dependent_rope",
    "drops-attention": "drops_attention",
    "experts-apart": "has_custom_expert_forward",
    "routers-apart": "has_unknown_routers",
    "experts-inputs-first": "has_inputs_first_experts",
}
"""Words in the table that describe the whole model, each with the field of `Anatomy` it sets."""
_LACKS = {"documents-joined": "masks_documents"}
"""Words for what a module of the user's lacks, each with the field that is then False."""
_ATTENTION = re.compile(r"(\d+)x(\d+)x(\d+)(?:@(\d+))?")


def parse_anatomy(table: Sequence[str]) -> Anatomy:
    """Parse the list of strings in `model.anatomy`.

    Raises:
        TrainctlError: An entry is malformed.
    """
    return _parse_table(tuple(table))


def expert_counts(table: Sequence[str]) -> dict[str, int | None]:
    """Return the expert counts of the model's largest sparse block, by configuration key.

    They come from the model's code: a config.json may omit a default, name a field differently, or
    name experts that the code does not use.
    """
    blocks = parse_anatomy(table).blocks
    most = max(blocks, key=lambda block: block.experts, default=None)
    return {
        "num_experts": (most.experts or None) if most else None,
        "experts_per_token": (most.experts_per_token or None) if most else None,
    }


def shape_from_anatomy(table: Sequence[str]) -> dict[str, Any]:
    """Return the model's sizes by configuration key, as far as its tensors determine them."""
    read = parse_anatomy(table)
    matrices = {p.role: p.shape for p in reversed(read.parameters) if len(p.shape) == 2}
    rows, width = matrices.get(Role.head) or matrices[Role.embedding]
    found: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": width,
        "num_layers": len(read.blocks),
        "tie_word_embeddings": read.has_tied_head,
        **expert_counts(table),
    }
    if read.blocks[0].attention:
        first = read.blocks[0].attention[0]
        found |= {"num_attention_heads": first.heads, "head_dim": first.key_width}
    return found


@lru_cache(maxsize=8)
def _parse_table(table: tuple[str, ...]) -> Anatomy:
    entries = from_table(table)
    blocks = [_parse_block(name, said) for name, said in entries if said.startswith("block ")]
    numbers = {block.name: number for number, block in enumerate(blocks)}
    parameters: list[Parameter] = []
    buffers: list[SavedBuffer] = []
    ties: list[tuple[str, str]] = []
    attentions: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    unsharded_init = code = ""
    flops: tuple[tuple[int, int], ...] = ()
    unsplit: list[tuple[str, str]] = []
    traits = set()
    for name, said in entries:
        kind, *words = said.split()
        if kind == "supports":
            attentions = tuple(words)
        elif kind == "joins-documents":
            joined = tuple(words)
        elif kind in _TRAITS or kind in _LACKS:
            traits.add(kind)
        elif kind == "unsplit":
            unsplit.append((words[0], " ".join(words[1:])))
        elif kind == "flops":
            flops = tuple((int(n), int(count)) for n, count in (each.split(":") for each in words))
        elif kind == "drawn-whole":
            unsharded_init = name
        elif kind == "code":
            code = words[0]
        elif kind == "tied":
            ties.append((name, words[0]))
        elif kind != "block":
            tensor = _parse_tensor(name, said, numbers)
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
        joined_attentions=joined,
        unsharded_init=unsharded_init,
        code=code,
        flops=flops,
        unsplit=tuple(unsplit),
        **{name: word in traits for word, name in _TRAITS.items()},
        **{name: word not in traits for word, name in _LACKS.items()},
    )


def _parse_tensor(name: str, said: str, blocks: dict[str, int]) -> Parameter | SavedBuffer:
    found = _TENSOR.fullmatch(said)
    if found is None or found[2] not in {"buffer", *(role.value for role in Role)}:
        raise _no_entry(name, said)
    sizes, role, shares, undecayed = found.groups()
    shape = () if sizes == "scalar" else tuple(map(int, sizes.split("x")))
    if role == "buffer":
        return SavedBuffer(name=name, shape=shape)
    return Parameter(
        name=name,
        shape=shape,
        role=Role(role),
        block=block_of(name, blocks),
        shares=int(shares or 0),
        is_undecayed=undecayed is not None,
    )


def block_of(name: str, blocks: dict[str, int]) -> int | None:
    """Return the index of the block that contains a parameter.

    Args:
        blocks: Index of each block, by the name of its module.
    """
    ends = (match.start() for match in re.finditer(r"\.", name))
    return next((blocks[name[:end]] for end in ends if name[:end] in blocks), None)


def _parse_block(name: str, said: str) -> Block:
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


def _shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"
