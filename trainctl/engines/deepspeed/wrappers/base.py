"""Base class of the adapters of DeepSpeed's wrappers.

DeepSpeed wraps the optimizer that makes the update in an optimizer of its own. The wrapper holds
the tensors and their gradients, and has its own way to clip, to drop a step and to publish weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from trainctl.engines.deepspeed.updaters import updater_of
from trainctl.engines.fragments import ElementRange, Fragment, cut, square
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.protocol import Change, States
from trainctl.engines.shards import Pieces
from trainctl.engines.updater import Updater


class Wrapper(States):
    """Adapter of one class of wrapper. Its methods suit most wrappers.

    Args:
        engine: DeepSpeed's engine, whose `optimizer` is the wrapper.
        pieces: The piece of each parameter that this rank holds.
        mesh: Position of this rank, which tells the ranks with the same parameters.
    """

    def __init__(self, engine: Any, pieces: Pieces, mesh: ProcessMesh) -> None:
        self._engine, self._wrapper = engine, engine.optimizer
        self._pieces, self._mesh = pieces, mesh
        self._parameters = {piece.name: parameter for parameter, piece in pieces.items()}
        self.optimizer = self._wrapped()
        self.tensors = self._masters()
        self.fragments = list(self._find_fragments())
        self._by_tensor: dict[int, list[Fragment]] = {}
        for fragment in self.fragments:
            self._by_tensor.setdefault(fragment.tensor, []).append(fragment)

    def _wrapped(self) -> Optimizer:
        """Return the optimizer that makes the update."""
        inside: Optimizer = self._wrapper.optimizer
        return inside

    @abstractmethod
    def _masters(self) -> list[torch.Tensor]:
        """Return the tensors that the optimizer updates."""

    @abstractmethod
    def _find_fragments(self) -> Iterable[Fragment]:
        """Return the fragments of the optimizer's tensors."""

    @abstractmethod
    def _gradient(self, index: int) -> list[torch.Tensor]:
        """Return the gradient of a tensor as consecutive flat parts; empty if it has none."""

    def group(self, index: int) -> dict[str, Any]:
        return self.optimizer.param_groups[index]

    def updater(self, index: int) -> Updater:
        return updater_of(self.optimizer)

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        updater_of(self.optimizer).restore_scalars(scalars)

    def check_readable(self) -> None:
        """Do nothing: this process holds the states."""

    def is_swapped(self, index: int) -> bool:
        return False

    def numel(self, index: int) -> int:
        return self.tensors[index].numel()

    def swapped_in(self, index: int, *, changes: bool = False) -> AbstractContextManager[None]:
        return nullcontext()

    def sync_master_weights(self) -> None:
        """Do nothing: the master weights follow every update."""

    @property
    def scale(self) -> float:
        scaler = self._wrapper.torch_autocast_gradscaler
        return float(scaler.get_scale() if scaler else self._wrapper.loss_scale)

    def squares(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        self._wait()
        for index in self._by_tensor:
            yield from self._squares(index)

    def change(self, change: Change) -> None:
        self._wait()
        for index in self._by_tensor:
            self._change(index, change)

    def _wait(self) -> None:
        """Wait until the gradients have arrived."""

    def _squares(self, index: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
        for fragment, _, values in self._cut(index):
            if fragment.owned:
                yield fragment, square(values)

    def _change(self, index: int, change: Change) -> None:
        for fragment, start, values in self._cut(index):
            change(ElementRange(fragment.name, fragment.shard, start, values.numel()), values)

    def _cut(self, index: int) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        """Return the gradient of a tensor as (fragment, start in the parameter's shard, values)."""
        return cut(self._by_tensor[index], [part.view(-1) for part in self._gradient(index)])

    def clip(self, norm: float | None, limit: float | None) -> None:
        """Set how the next update clips the gradients.

        Args:
            norm: Norm of the gradients; None where only DeepSpeed can tell.
            limit: Clipping threshold; None does not clip.
        """
        self._wrapper.clip_grad = limit or 0.0

    def use_norm(self, norm: float) -> None:
        """Make the next update use this gradient norm, where DeepSpeed's own is not reliable."""

    @contextmanager
    def without_update(self) -> Iterator[None]:
        """Make the wrapper's step, within the context, clear the gradients and update nothing."""
        self._wrapper.step = lambda *_, **__: self._clear()
        self._say_finite()
        try:
            yield
        finally:
            del self._wrapper.step  # restores the class's method

    def _say_finite(self) -> None:
        """Report finite gradients to DeepSpeed's engine, which asks after each step."""
        self._wrapper.overflow = False

    def _clear(self) -> None:
        """Clear the gradients as an update does."""
        self._wrapper.zero_grad()
