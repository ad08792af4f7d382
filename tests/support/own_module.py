"""A module that no class of transformers resembles: a gated linear recurrence beside attention.

Every optional method of the protocol (`trainctl.models.module`) is there; `bare` makes the same
module with `blocks` alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Sizes:
    vocab_size: int = 264
    width: int = 32
    depth: int = 4
    heads: int = 4
    decay: float = 0.5


class Recurrence(nn.Module):
    """A gated linear recurrence: h[t] = a[t] h[t-1] + (1 - a[t]) v[t], a = sigmoid(gate)."""

    def __init__(self, width: int, decay: float) -> None:
        super().__init__()
        self.start = nn.LayerNorm(width)
        self.value = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width)
        self.decay = nn.Parameter(torch.full((width,), decay))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        normed = self.start(hidden)
        value = self.value(normed)
        # A document's first token forgets what came before it.
        keep = torch.sigmoid(self.gate(normed) + self.decay) * ~begins[..., None]
        state, states = torch.zeros_like(value[:, 0]), []
        for a, v in zip(keep.unbind(1), value.unbind(1), strict=True):
            state = a * state + (1 - a) * v
            states.append(state)
        return hidden + self.out(torch.stack(states, dim=1))


class Mixing(nn.Module):
    """Causal attention, and a gated layer beside it rather than behind."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.start = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * width)
        self.side = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
        normed = self.start(hidden)
        shape = (*hidden.shape[:2], -1, hidden.shape[-1] // self.heads)
        query, key, value = (
            layer(normed).view(shape).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        document = begins.cumsum(1)
        same = document[:, :, None] == document[:, None, :]
        seen = F.scaled_dot_product_attention(query, key, value, same.tril()[:, None])
        mixed = self.out(seen.transpose(1, 2).flatten(2))
        return hidden + mixed + self.down(F.silu(self.up(normed)) * self.side(normed))


class Bare(nn.Module):
    """Recurrences and attention in turn, with a head tied to the embedding by hand."""

    masks_documents = True

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tokens = nn.Embedding(sizes.vocab_size, sizes.width)
        self.mixers = nn.ModuleList(
            Mixing(sizes.width, sizes.heads) if index % 2 else Recurrence(sizes.width, sizes.decay)
            for index in range(sizes.depth)
        )
        self.end = nn.LayerNorm(sizes.width)
        self.unembed = nn.Linear(sizes.width, sizes.vocab_size)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        hidden, begins = self.tokens(input_ids), position_ids == 0
        for mixer in self.mixers:
            hidden = mixer(hidden, begins)
        return self.unembed(self.end(hidden))

    def blocks(self) -> Sequence[nn.Module]:
        return list(self.mixers)


class Full(Bare):
    """Bare with every optional method of the protocol."""

    def no_decay(self) -> Sequence[str]:
        return ["unembed.weight"]

    def initialize(self, name: str, tensor: torch.Tensor) -> None:
        if name.endswith("decay"):
            tensor.copy_(torch.linspace(-1, 1, tensor.numel()))
        elif name.endswith(("out.weight", "down.weight")):
            tensor.normal_(std=0.02 / self.sizes.depth**0.5)
        elif tensor.dim() > 1:
            tensor.normal_(std=0.02)

    def flops_per_token(self, sequence_length: int) -> float:
        width, depth = self.sizes.width, self.sizes.depth
        recurrence, mixing = 3 * width**2, 10 * width**2 + 2 * width * sequence_length
        return 6 * (depth // 2 * (recurrence + mixing) + width * self.sizes.vocab_size)

    def tensor_plan(self) -> Mapping[str, str]:
        columns = [
            "value",
            "gate",
            "decay",
            "query",
            "key",
            "up",
            "side",
        ]  # heads follow from the widths
        return {
            **{f"mixers.*.{name}": "colwise" for name in columns},
            **{f"mixers.*.{name}": "rowwise" for name in ("out", "down")},
        }

    def pipeline_plan(self) -> Sequence[str]:
        return ["tokens", "mixers", "end", "unembed"]


class Tied(Full):
    """Module with one matrix for embedding and head."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.unembed.weight = self.tokens.weight

    def no_decay(self) -> Sequence[str]:
        return []


def bare(sizes: Sizes) -> Bare:
    return Bare(sizes)


def full(sizes: Sizes) -> Full:
    return Full(sizes)


def tied(sizes: Sizes) -> Tied:
    return Tied(sizes)
