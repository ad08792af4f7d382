"""Language model of causal convolutions: a plain torch module, made by the function `model`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class ConvolutionSizes:
    """Arguments of `model`, set as `model.arguments.NAME=VALUE`."""

    vocab_size: int = 264
    width: int = 64
    depth: int = 2
    kernel: int = 8


class ConvolutionBlock(nn.Module):
    def __init__(self, sizes: ConvolutionSizes) -> None:
        super().__init__()
        width = sizes.width
        self.reach = sizes.kernel - 1
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Conv1d(width, width, sizes.kernel, groups=width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = nn.functional.pad(self.norm(hidden).transpose(1, 2), (self.reach, 0))
        mixed = self.mix(before).transpose(1, 2)
        return hidden + self.down(nn.functional.gelu(self.up(mixed)))


class ConvolutionModel(nn.Module):
    """Module with `forward` and the optional `blocks`; docs/your-own-script.md has the others."""

    def __init__(self, sizes: ConvolutionSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.width)
        self.layers = nn.ModuleList(ConvolutionBlock(sizes) for _ in range(sizes.depth))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return the logits; a token sees none after it."""
        hidden = self.embedding(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))

    def blocks(self) -> Sequence[nn.Module]:
        """Return what is recomputed, wrapped and counted as one."""
        return list(self.layers)


def model(sizes: ConvolutionSizes) -> ConvolutionModel:
    """Make the module; `model.factory` names this function."""
    return ConvolutionModel(sizes)
