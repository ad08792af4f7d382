"""Optimizer states under `fully_shard`: one tensor for each parameter, its shard in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainctl.engines.fragments import ElementRange, Fragment, square
from trainctl.engines.fsdp2.shards import Sharded, start_of
from trainctl.engines.mesh import Axis
from trainctl.engines.protocol import CLIPPING_EPSILON, Change, States
from trainctl.engines.shards import Pieces
from trainctl.engines.updater import Updater


class Shards(States):
    """States whose tensors are each a range of one parameter, with the same range of its gradient.

    Args:
        optimizer: Optimizer of the shards.
        parameters: All parameters that the model trains.
        units: Modules that gather the parameters.
        pieces: The piece of each shard.
        replicas: The ranks over which parameters are sharded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Sharded],
        units: Sequence[FSDPModule],
        pieces: Pieces,
        replicas: Axis,
    ) -> None:
        self.optimizer = optimizer
        self._units, self._parameters = units, parameters
        self._updater = Updater(optimizer)
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [each.shard for each in parameters]
        self._groups = [groups[tensor] for tensor in self.tensors]
        self.fragments = [
            Fragment.of_piece(
                pieces[shard], start_of(pieces[shard].shape, replicas), shard.numel(), index, 0
            )
            for index, shard in enumerate(self.tensors)
            if shard.numel()
        ]

    def group(self, index: int) -> dict[str, Any]:
        return self._groups[index]

    def updater(self, index: int) -> Updater:
        return self._updater

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Do nothing: the optimizer keeps no values beyond its states."""

    def check_readable(self) -> None:
        """Do nothing: this process holds the states."""

    def is_swapped(self, index: int) -> bool:
        return False

    def numel(self, index: int) -> int:
        return self.tensors[index].numel()

    def swapped_in(self, index: int, *, changes: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def sync_master_weights(self) -> None:
        """Do nothing: the shards are the master weights."""

    def copy_masters_to_parameters(self) -> None:
        """Free the gathered parameters, which hold the old values, so that torch gathers them
        again.
        """
        for unit in self._units:
            unit.reshard()

    @property
    def scale(self) -> float:
        return 1.0

    def squares(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        for fragment, gradient in self._gradients():
            if fragment.owned:
                yield fragment, square(gradient)

    def change(self, change: Change) -> None:
        for fragment, gradient in self._gradients():
            change(ElementRange(fragment.name, None, fragment.start, fragment.numel), gradient)

    def _gradients(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        for fragment in self.fragments:
            gradient = self.tensors[fragment.tensor].grad
            assert gradient is not None
            yield fragment, gradient.view(-1)

    def take_gradients(self) -> None:
        """Give the shards the gradients of the step's backward passes."""
        for each in self._parameters:
            each.take_gradient()

    @torch.no_grad()
    def update(self, norm: float, limit: float | None) -> None:
        """Clip the gradients and step.

        Args:
            limit: Clipping threshold; None does not clip.
        """
        if limit is not None and limit < norm + CLIPPING_EPSILON:
            for _, gradient in self._gradients():
                gradient.mul_(limit / (norm + CLIPPING_EPSILON))
        self.optimizer.step()

    def drop_gradients(self) -> None:
        """Clear the gradients."""
        for each in self._parameters:
            each.drop_gradient()
