"""Statistics of each layer: norms of gradients and activations, size of updates, dead units."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trainctl.options.callbacks import Callback, Context
from trainctl.options.callbacks.layer_statistics import LayerStatisticsConfig
from trainctl.train.models.model import blocks
from trainctl.train.models.recompute import is_recomputing

OUTPUT_PROJECTION = re.compile(
    r"(mlp|feed_?forward|ffn)\.(.*\.)?(down_proj|c_proj|fc2|fc_out|w2|wo|dense_4h_to_h|output)$"
)
"""Name, within a block, of the linear layer whose inputs are a feed-forward layer's units.

Experts have other names: their units are not counted, since few tokens reach each of them.
"""


class LayerStatistics(Callback):
    """Measures a step by hooks on the blocks, and by a copy of the rank's weights in host memory.

    The copy is 4 bytes for each weight that the rank holds, between backward and update.
    """

    def __init__(self, keys: LayerStatisticsConfig) -> None:
        self._keys = keys
        self._hooks: list[RemovableHandle] = []
        self._activations: torch.Tensor
        self._units: dict[int, torch.Tensor] = {}
        self._gradients: list[float] | None = None
        self._weights: list[torch.Tensor] = []

    def on_train_start(self, context: Context) -> None:
        self._blocks = blocks(context.module)
        self._layers = len(self._blocks)
        names = {module: name for name, module in context.module.named_modules()}
        # `layers` or `h`: other numbers in the names of parameters are no layers.
        block_list = names[self._blocks[0]].split(".")[-2]
        in_layer = re.compile(rf"(?:^|\.){re.escape(block_list)}\.(\d+)\.")
        layers = {name: in_layer.search(name) for name in context.shapes}
        self._others = [name for name, layer in layers.items() if layer is None]
        self._rows = {name: int(layer[1]) for name, layer in layers.items() if layer}
        self._rows |= {name: self._layers + row for row, name in enumerate(self._others)}

    def before_step(self, context: Context) -> None:
        self._clear()  # of a step that is repeated
        if context.step % self._keys.every_steps:
            return
        self._activations = torch.zeros(self._layers, 2, dtype=torch.float64, device=context.device)
        for index, block in enumerate(self._blocks):
            self._hooks.append(block.register_forward_hook(partial(self._add_output, index)))
            units = _output_projection(block)
            if units is not None:
                self._hooks.append(units.register_forward_pre_hook(partial(self._add_units, index)))

    def after_backward(self, context: Context) -> None:
        if not self._hooks:
            return
        self._remove_hooks()
        gradients = context.gradients() if context.has_gradients else ()
        self._gradients = self._summed(
            (part.name, part.values) for part in gradients if part.is_counted
        )
        self._weights = [
            part.values.to("cpu", torch.float32, copy=True)
            for part in context.weights()
            if part.is_counted
        ]

    def after_step(self, context: Context) -> None:
        if self._gradients is None:
            return
        counted = [part for part in context.weights() if part.is_counted]
        before = list(zip(counted, self._weights, strict=True))
        weights = self._summed((part.name, old) for part, old in before)
        updates = self._summed((part.name, part.values.cpu().float() - old) for part, old in before)
        squares, counts = self._activations.T.tolist()
        units = self._active_units(context)
        own = [*self._gradients, *weights, *updates, *squares, *counts]
        sums = context.collectives.sum(*own, *units.flatten().tolist())
        size, layers = len(self._gradients), self._layers
        gradients, weights, updates = (sums[i * size : (i + 1) * size] for i in range(3))
        squares, counts = (sums[3 * size + i * layers :][:layers] for i in range(2))
        active = torch.tensor(sums[len(own) :]).view(units.shape) > 0
        values: dict[str, Any] = {}
        if context.has_gradients:
            values["gradient_norm"] = [square**0.5 for square in gradients]
        values["update_ratio"] = [
            (update / weight) ** 0.5 if weight else None
            for update, weight in zip(updates, weights, strict=True)
        ]
        others = {
            key: dict(zip(self._others, each[self._layers :], strict=True))
            for key, each in values.items()
        }
        values = {key: each[:layers] for key, each in values.items()}
        values["activation_rms"] = [
            (square / count) ** 0.5 if count else None
            for square, count in zip(squares, counts, strict=True)
        ]
        if units.shape[1]:
            values["dead_share"] = (1 - active.double().mean(dim=1)).tolist()
        context.record("layers", **values)
        context.record("others", **others)
        self._clear()

    def close(self) -> None:
        self._clear()

    def _summed(self, parts: Any) -> list[float]:
        """Return the sum of squares of each layer, and of each parameter outside the layers."""
        sums = [0.0] * (self._layers + len(self._others))
        for name, values in parts:
            sums[self._rows[name]] += float(values.double().square().sum())
        return sums

    def _add_output(self, layer: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if not block.training or is_recomputing():
            return
        states = (output if isinstance(output, torch.Tensor) else output[0]).detach()
        self._activations[layer, 0] += states.double().square().sum()
        self._activations[layer, 1] += states.numel()

    def _add_units(self, layer: int, projection: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if not projection.training or is_recomputing():
            return
        largest = inputs[0].detach().abs().flatten(0, -2).amax(dim=0)
        known = self._units.get(layer)
        self._units[layer] = largest if known is None else torch.maximum(known, largest)

    def _active_units(self, context: Context) -> torch.Tensor:
        """Return 1 for each unit that some token of this rank activates: (layers, units).

        Tensor ranks hold different units of a layer; the others see different tokens.
        """
        ranks, layers = context.plan.mesh.tensor, self._layers
        width = max((units.numel() for units in self._units.values()), default=0)
        if len(self._units) < layers:
            return torch.zeros(layers, 0)  # sparse layers among them
        active = torch.zeros(layers, ranks, width)
        for layer, units in self._units.items():
            active[layer, context.rank % ranks] = (units > self._keys.dead_below).float().cpu()
        return active.flatten(1)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _clear(self) -> None:
        self._remove_hooks()
        self._gradients, self._weights, self._units = None, [], {}


def _output_projection(block: nn.Module) -> nn.Module | None:
    """Return the linear layer that takes the units of a block's feed-forward layer, if it is
    known.
    """
    found = [each for name, each in block.named_modules() if OUTPUT_PROJECTION.search(name)]
    return found[-1] if found else None
