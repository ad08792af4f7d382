"""Gradients of a step between its last backward pass and its update, wherever they are kept.

The engine's `States` know where they are. Here are the norms of parameter groups over all ranks,
and changes of gradients before the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trainctl.config.schema import RunConfig
from trainctl.engines.fragments import ElementRange
from trainctl.engines.process import Process
from trainctl.engines.protocol import Change, Engine
from trainctl.train.groups import group_key


@dataclass(frozen=True, slots=True)
class Norms:
    """Gradient norms of a step over all ranks, each element counted once; the same on all ranks."""

    total: float
    """Norm over all parameters."""
    groups: dict[str, float]
    """Norm of each parameter group, by name."""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.total)


class Gradients:
    """Gradients of this rank's step. All ranks call the same methods in the same order.

    Args:
        config: The run's configuration, by which parameters are grouped.

    Attributes:
        limits: Clipping limit of each parameter group that has its own, by name; of groups on any
            rank.
    """

    def __init__(self, engine: Engine, process: Process, config: RunConfig) -> None:
        self._states, self._process = engine.states, process
        trained = (piece for each, piece in engine.pieces.items() if each.requires_grad)
        keys = {piece.name: group_key(piece, config) for piece in trained}
        self._group_of = {name: key.name(config) for name, key in keys.items()}
        limits = {key.name(config): key.clip_at for key in keys.values() if key.clip_at}
        # A pipeline stage may lack a group, but all ranks must sum the same list.
        everywhere = process.gather((sorted(set(self._group_of.values())), limits))
        self._groups = sorted(set().union(*(groups for groups, _ in everywhere)))
        self.limits: dict[str, float] = {}
        for _, found in everywhere:
            self.limits |= found

    @property
    def are_visible(self) -> bool:
        """Whether gradients can be read before the update (TC069)."""
        return self._states.has_readable_gradients

    @property
    def scale(self) -> float:
        """Factor of the gradients until the update divides by it: the fp16 loss scale."""
        return self._states.scale

    def norms(self) -> Norms:
        """Return the gradient norms, in double precision on a CPU and fp32 elsewhere."""
        squares: dict[str, list[torch.Tensor]] = {name: [] for name in self._groups}
        for fragment, square in self._states.squares():
            squares[self._group_of[fragment.name]].append(square)
        sums = self._process.sum(*_added_up(list(squares.values())))
        scale = self.scale
        return Norms(
            total=math.sqrt(math.fsum(sums)) / scale if _all_finite(sums) else math.nan,
            groups={
                name: math.sqrt(value) / scale if math.isfinite(value) else math.nan
                for name, value in zip(self._groups, sums, strict=True)
            },
        )

    @torch.no_grad()
    def change(self, change: Change) -> None:
        """Change every gradient element, here and in every copy that decides the update."""
        self._states.change(change)

    def scale_groups(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradients of parameter groups by `factors`; other groups keep theirs."""

        def scale(place: ElementRange, values: torch.Tensor) -> None:
            factor = factors.get(self._group_of[place.name])
            if factor is not None:
                values.mul_(factor)

        self.change(scale)


def _added_up(columns: list[list[torch.Tensor]]) -> list[float]:
    """Return the sum of each list of scalars, all read from the device at once."""
    totals = _totals([column for column in columns if column])
    read = iter(totals.tolist())
    return [next(read) if column else 0.0 for column in columns]


def _totals(columns: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the sum of each list; none may be empty.

    A partly offloaded optimizer has scalars on the CPU and on the device; the device adds them.
    """
    devices = {value.device for column in columns for value in column}
    device = max(devices, key=lambda each: each.type != "cpu", default=torch.device("cpu"))
    sums = [torch.stack([value.to(device) for value in column]).sum() for column in columns]
    return torch.stack(sums) if sums else torch.zeros(0, device=device)


def _all_finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))
