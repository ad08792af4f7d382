"""The tensors of a model that are its state: parameters and persistent buffers.

A parameter with several names, such as a tied head, goes by its first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A persistent buffer of a model, which its published weights contain."""

    name: str
    module: nn.Module
    key: str
    """Attribute name in the module."""

    @property
    def tensor(self) -> torch.Tensor:
        """The buffer's current tensor; assigning to the module may replace it."""
        found = self.module.get_buffer(self.key)
        assert isinstance(found, torch.Tensor)
        return found


def persistent_buffers(model: nn.Module) -> list[Buffer]:
    """Return the floating-point buffers in the model's state dict: a router's bias, but not a
    table of rotary angles.
    """
    kept = model.state_dict().keys()
    found = []
    for path, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if name in kept and tensor.is_floating_point():
                found.append(Buffer(name, module, key))
    return found


def those_of(model: nn.Module, buffers: Iterable[Buffer]) -> list[Buffer]:
    """Return the buffers whose module is still in the model after it was cut to a stage."""
    here = set(model.modules())
    return [buffer for buffer in buffers if buffer.module in here]


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers of a whole model, by canonical name."""
    buffers = {buffer.name: buffer.tensor for buffer in persistent_buffers(model)}
    return dict(model.named_parameters()) | buffers


def names_of_tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of each tied parameter, by its canonical name."""
    first: dict[nn.Parameter, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(parameter, name)
        if canonical != name:
            others.setdefault(canonical, []).append(name)
    return others
