"""Base class of the adapters of DeepSpeed's wrappers.

DeepSpeed wraps the optimizer that makes the update in an optimizer of its own. The wrapper holds
the tensors and their gradients, and has its own way to clip, to drop a step and to publish weights.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from torch.optim import Optimizer

from trainctl.engines.process import ProcessMesh
from trainctl.engines.protocol import Change, States, Updater
from trainctl.engines.shards import (
    ElementRange,
    Fragment,
    Pieces,
    cut_into_fragments,
    fragment_norms,
    sum_of_squares,
)


class _CountsInInt(Updater):
    """Updater of DeepSpeedCPULion, whose step count is an int."""

    def step_count(self, tensor: torch.Tensor, value: float) -> int:
        return int(value)


class _FusedLion(_CountsInInt):
    """Updater of FusedLion, which counts steps on the last parameter of a group only and ignores
    them.
    """

    has_uniform_step_count = False


class _CPUAdam(_CountsInInt):
    """Updater of DeepSpeedCPUAdam, whose host kernel keeps values beyond the states."""

    def state_type(self, tensor: torch.Tensor) -> torch.dtype:
        if self.optimizer.fp32_optimizer_states:
            return torch.float32  # also under bf16 master weights
        return tensor.dtype

    def restore_scalars(self, scalars: Mapping[str, float]) -> None:
        """Repeat the steps of the kernel's counters, on a tensor of one element.

        CPUAdam keeps the powers of its betas as running products in fp32 (csrc/includes/cpu_adam.h,
        IncrementStep); a power computed at once differs in the last bit.
        """
        one = torch.zeros(1)
        for step in range(1, int(scalars.get("step", 0)) + 1):
            group = self.optimizer.param_groups[0]
            self.optimizer.ds_opt_adam.adam_update(
                self.optimizer.opt_id,
                step,
                0.0,
                *group["betas"],
                group["eps"],
                0.0,
                group["bias_correction"],
                *(one, one, one, one),
            )


_KINDS = {
    DeepSpeedCPUAdam: _CPUAdam,
    DeepSpeedCPULion: _CountsInInt,
    FusedLion: _FusedLion,
}


def updater_of(optimizer: Optimizer) -> Updater:
    """Return the updater for the class of the optimizer that makes the update."""
    found = (adapter for kind, adapter in _KINDS.items() if isinstance(optimizer, kind))
    return next(found, Updater)(optimizer)


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
        return self._wrapper.optimizer

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

    @property
    def scale(self) -> float:
        scaler = self._wrapper.torch_autocast_gradscaler
        return float(scaler.get_scale() if scaler else self._wrapper.loss_scale)

    def gradients(self) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        self._wait()
        for index in self._by_tensor:
            with self.swapped_in(index):
                yield from self._cut(index)

    def norms(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        self._wait()
        held = (index for index in self._by_tensor if not self.is_swapped(index))
        found = ((fragment, part) for index in held for fragment, _, part in self._cut(index))
        yield from fragment_norms([each for each in found if each[0].owned])

    def change(self, change: Change) -> None:
        self._wait()
        for index in self._by_tensor:
            self._change(index, change)

    def _wait(self) -> None:
        """Wait until the gradients have arrived."""

    def _change(self, index: int, change: Change) -> None:
        for fragment, start, values in self._cut(index):
            change(ElementRange(fragment.name, fragment.shard, start, values.numel()), values)

    def _cut(self, index: int) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        """Return the gradient of a tensor as (fragment, start in the parameter's shard, values)."""
        return cut_into_fragments(
            self._by_tensor[index], [part.view(-1) for part in self._gradient(index)]
        )

    def clip(self, norm: float | None, limit: float | None) -> None:
        """Set how the next update clips the gradients.

        Args:
            norm: Norm of the gradients; None where only DeepSpeed can tell.
            limit: Clipping threshold; None does not clip.
        """
        self._wrapper.clip_grad = limit or 0.0

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


class HostOptimizerMixin(Wrapper):
    """Mixin for optimizers in host memory; it comes before the wrapper's class."""

    def _gradient(self, index: int) -> list[torch.Tensor]:
        gradient = self.tensors[index].grad
        return [] if gradient is None else [gradient]

    def _change(self, index: int, change: Change) -> None:
        super()._change(index, change)
        for fragment, _, values in self._cut(index):  # one part per fragment: the gradient is flat
            self._wrapper.norm_for_param_grads[self._key(fragment)] = (
                sum_of_squares(values).sqrt().float()
            )

    def _noted_norms(self, index: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Yield the norms that DeepSpeed took, without reading gradients from NVMe."""
        for fragment in self._by_tensor[index]:
            norm = self._wrapper.norm_for_param_grads.get(self._key(fragment))
            if fragment.owned and norm is not None:
                yield fragment, torch.as_tensor(norm)

    def _key(self, fragment: Fragment) -> int:
        return int(self._wrapper.get_param_id(self._parameters[fragment.name]))
