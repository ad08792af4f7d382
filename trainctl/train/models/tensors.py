"""The tensors of a model that are its state: parameters, and buffers that checkpoints keep.

A parameter that has several names, as a tied head has, is known by its first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, eq=False)
class Buffer:
    """A tensor of a model that is no parameter and that its published weights have."""

    name: str
    module: nn.Module
    key: str
    """What the module calls it."""

    @property
    def tensor(self) -> torch.Tensor:
        """It as it is now."""
        found = self.module.get_buffer(self.key)
        assert isinstance(found, torch.Tensor)
        return found


def persistent_buffers(model: nn.Module) -> list[Buffer]:
    """Return the buffers of a model that are part of its state: a router's bias, not a table of
    angles."""
    kept = model.state_dict().keys()
    found = []
    for path, module in model.named_modules():
        for key, tensor in module.named_buffers(recurse=False):
            name = f"{path}.{key}" if path else key
            if name in kept and tensor.is_floating_point():
                found.append(Buffer(name, module, key))
    return found


def those_of(model: nn.Module, buffers: Iterable[Buffer]) -> list[Buffer]:
    """Those of a whole model's that are still there after it was cut to a stage."""
    here = set(model.modules())
    return [buffer for buffer in buffers if buffer.module in here]


def canonical_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of a whole model, by canonical name."""
    buffers = {buffer.name: buffer.tensor for buffer in persistent_buffers(model)}
    return dict(model.named_parameters()) | buffers


def names_of_tied(model: nn.Module) -> dict[str, list[str]]:
    """Return the other names of the parameters that have several, by their canonical one."""
    first: dict[nn.Parameter, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        canonical = first.setdefault(parameter, name)
        if canonical != name:
            others.setdefault(canonical, []).append(name)
    return others
