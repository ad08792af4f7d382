"""Without ZeRO: every replica holds and updates everything."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainctl.engines.deepspeed.wrappers.base import Wrapper
from trainctl.engines.fragments import Fragment
from trainctl.engines.protocol import CLIPPING_EPSILON


class Replicated(Wrapper):
    """Adapter with one tensor per parameter, whose gradient is the same on every replica."""

    are_partitioned = False

    @abstractmethod
    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter with the fp32 tensor that the optimizer updates."""

    def _masters(self) -> list[torch.Tensor]:
        return [master for _, master in self._pairs()]

    def _find_fragments(self) -> Iterator[Fragment]:
        """Yield one fragment per parameter; parameters are dealt out to the replicas for saving."""
        for index, (parameter, _) in enumerate(self._pairs()):
            piece = self._pieces[parameter]
            replicas = self._mesh.expert_replicas if piece.is_expert else self._mesh.replicas
            dealt = index % replicas.size == replicas.index
            yield Fragment.of_piece(piece, 0, parameter.numel(), index, 0, dealt=dealt)

    def group(self, index: int) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return [group for group in groups for _ in group["params"]][index]

    @property
    def scale(self) -> float:
        """Loss scale of torch's autocast, else 1: without ZeRO, DeepSpeed itself scales no loss."""
        scaler = self._engine.torch_autocast_z0_gradscaler
        return float(scaler.get_scale()) if scaler else 1.0

    def _gradient(self, index: int) -> list[torch.Tensor]:
        gradients = []
        for fragment in self._by_tensor[index]:
            parameter = self._parameters[fragment.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def copy_masters_to_parameters(self) -> None:
        for fragment in self.fragments:
            values = fragment.of(self.tensors[fragment.tensor].detach().view(-1))
            flat = self._parameters[fragment.name].data.view(-1)
            flat[fragment.start : fragment.start + fragment.numel].copy_(values)


class Unwrapped(Replicated):
    """Adapter of a torch optimizer without a wrapper, in fp32; clipping uses the trainer's norm."""

    def _wrapped(self) -> Optimizer:
        bare: Optimizer = self._wrapper
        return bare

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(p, p) for group in self.optimizer.param_groups for p in group["params"]]

    def clip(self, norm: float | None, limit: float | None) -> None:
        assert norm is not None
        if limit is not None and limit < norm + CLIPPING_EPSILON:
            for parameter in self._pieces:
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + CLIPPING_EPSILON))

    def _say_finite(self) -> None:
        """Do nothing: the engine asks a bare optimizer nothing."""


class MasterCopies(Replicated):
    """Adapter of `FP16_UnfusedOptimizer`, which keeps an fp32 copy of each 16-bit parameter."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        """Remove the states of the update that DeepSpeed makes in order to allocate them.

        That update would count as the first step of Adam's bias correction. (The groups start with
        a learning rate of 0, so the weights have not moved.)
        """
        engine.optimizer.optimizer.state.clear()
        super().__init__(engine, *arguments)

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [
            pair
            for models, masters in zip(
                self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True
            )
            for pair in zip(models, masters, strict=True)
        ]
