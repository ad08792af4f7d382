"""Gradients of a step between its last backward pass and its update, wherever they are kept.

The engine's `States` know where they are. Here are the norms of parameter groups over all ranks,
the clipping threshold, and changes other than norm clipping: centralization, clipping by value,
noise.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers.pytorch_utils import Conv1D

from trainctl.config.schema import AdaptiveClipping, GradientsConfig, RunConfig
from trainctl.engines.process import Axis, Process
from trainctl.engines.protocol import CLIPPING_EPSILON, Change, Engine
from trainctl.engines.shards import ElementRange, ParameterPiece, Pieces
from trainctl.train.optimizers import group_key


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
        limits: By the name of each parameter group with a limit of its own, on any rank: the entry
            of `optimizer.groups` that sets it, and the limit.
    """

    def __init__(self, engine: Engine, process: Process, config: RunConfig) -> None:
        self._states, self._process = engine.states, process
        trained = (piece for each, piece in engine.pieces.items() if each.requires_grad)
        keys = {piece.name: group_key(piece, config) for piece in trained}
        self._group_of = {name: key.name(config) for name, key in keys.items()}
        limits = {
            key.name(config): (key.clip_entry, key.clip_at) for key in keys.values() if key.clip_at
        }
        # A pipeline stage may lack a group, but all ranks must sum the same list.
        everywhere = process.gather((sorted(set(self._group_of.values())), limits))
        self._groups = sorted(set().union(*(groups for groups, _ in everywhere)))
        self._measured: list[str] = []
        self.limits: dict[str, tuple[int, float]] = {}
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

    def measure(self) -> torch.Tensor:
        """Return the norms of this rank's fragments, (fragments,) in fp64, on the device.

        They are taken in double precision on a CPU and in fp32 elsewhere.
        """
        found = list(self._states.norms())
        self._measured = [self._group_of[fragment.name] for fragment, _ in found]
        return _on_one_device([norm for _, norm in found])

    def add_up(self, numbers: Sequence[float]) -> list[float]:
        """Return this rank's sum of squares of each parameter group, from its fragments' norms."""
        squares: dict[str, list[float]] = {name: [] for name in self._groups}
        for group, norm in zip(self._measured, numbers, strict=True):
            squares[group].append(norm * norm)
        return [math.fsum(each) for each in squares.values()]

    def norms(self, sums: Sequence[float] | None = None) -> Norms:
        """Return the gradient norms.

        Args:
            sums: Results of `add_up` summed over all ranks; by default they are measured now.
        """
        if sums is None:
            sums = self._process.sum(*self.add_up(self.measure().tolist()))
        scale = self.scale
        return Norms(
            total=(
                math.sqrt(math.fsum(sums)) / scale if all(map(math.isfinite, sums)) else math.nan
            ),
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


def _on_one_device(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the scalars as one vector in fp64, which is read at once.

    A partly offloaded optimizer has scalars on the CPU and on the device; the device holds them.
    """
    devices = {each.device for each in scalars}
    device = max(devices, key=lambda each: each.type != "cpu", default=torch.device("cpu"))
    held = [each.to(device) for each in scalars]
    return torch.stack(held).double() if held else torch.zeros(0, dtype=torch.float64)


def clipped_groups(
    norms: Mapping[str, float], limits: Mapping[str, tuple[int, float]]
) -> dict[str, float]:
    """Return factors that scale down the gradients of parameter groups above their own limits.

    The groups of one entry of `optimizer.groups` (matrices and norms, layers with other learning
    rates) share one norm and one factor.

    Args:
        norms: Gradient norm of each group; finite.
        limits: As `Gradients.limits`.
    """
    entries: dict[int, list[str]] = {}
    for name, (entry, _) in limits.items():
        entries.setdefault(entry, []).append(name)
    norm_of = {
        entry: math.hypot(*(norms[name] for name in names)) + CLIPPING_EPSILON
        for entry, names in entries.items()
    }
    return {
        name: limit / norm_of[entry]
        for name, (entry, limit) in limits.items()
        if norm_of[entry] > limit
    }


class NormHistory:
    """Gradient norms of the last updates, and the clipping threshold that follows from them.

    ``percentile`` is AutoClip (arXiv:2007.14469): the threshold of a step is a percentile of all
    norms so far, including the step's own. ``mean`` is a multiple of the mean of the earlier norms.
    Both look back over the last `gradients.adaptive_window` updates that were made. The norms are
    taken after changes to elements and groups, right before clipping. Both replace
    `optimizer.gradient_clipping`, which applies only where there is no norm to follow, as at the
    first update of ``mean``.

    Args:
        config: Kind and window of adaptive clipping.
        fixed: `optimizer.gradient_clipping`; 0 for none.
    """

    def __init__(self, config: GradientsConfig, fixed: float = 0.0) -> None:
        self._config, self._fixed = config, fixed or None
        self._norms: deque[float] = deque(maxlen=config.adaptive_window)

    @classmethod
    def of(cls, config: RunConfig) -> NormHistory:
        """Return an empty history with a run's settings."""
        return cls(config.gradients, config.optimizer.gradient_clipping)

    @property
    def is_adaptive(self) -> bool:
        """Whether the threshold follows earlier norms."""
        return self._config.adaptive_clipping is not AdaptiveClipping.none

    def limit(self, norm: float | None) -> float | None:
        """Return the threshold of a step with this gradient norm; None if nothing is clipped.

        Args:
            norm: Norm right before clipping. None, or not finite, gives the fixed threshold.
        """
        if norm is None or not math.isfinite(norm):
            return self._fixed
        match self._config.adaptive_clipping:
            case AdaptiveClipping.percentile:
                norms = [*self._norms, norm][-self._config.adaptive_window :]
                return float(np.percentile(norms, self._config.adaptive_percentile))
            case AdaptiveClipping.mean if self._norms:
                return self._config.adaptive_factor * float(np.mean(self._norms))
            case _:
                return self._fixed

    def add(self, norm: float) -> None:
        """Record the norm of an update that was made."""
        if self.is_adaptive:
            self._norms.append(norm)

    def state(self) -> list[float]:
        """Return the norms for the checkpoint, exact: a resume clips at the same thresholds."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Replace the history by a checkpoint's norms."""
        self._norms.clear()
        self._norms.extend(norms)


_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Multipliers of splitmix64 (Steele, Lea and Flood, 2014)."""
_MANTISSA = 1 << 24
_AT_ONCE = 1 << 22
"""Elements that noise is drawn for at a time: drawing takes some 40 bytes an element."""


def centralize(model: nn.Module, pieces: Pieces, axis: Axis | None) -> int:
    """Register hooks that subtract from a linear weight's gradient its mean over the inputs.

    Gradient centralization (arXiv:2004.01461, eq. 1). It is linear, so it is applied to the whole
    gradient of every micro-batch, before ZeRO partitions it. Embeddings, and an output projection
    tied to one, keep their gradients.

    Args:
        model: Trained model with this rank's parameters.
        axis: Tensor-parallel axis, if it splits the matrices.

    Returns:
        The number of matrices.
    """
    count = 0
    for module in model.modules():
        if isinstance(module, nn.Linear | Conv1D):
            piece = pieces.get(module.weight)
            if piece is not None and not piece.is_embedding:
                inputs = 0 if isinstance(module, Conv1D) else 1
                module.weight.register_hook(_centering_hook(inputs, piece, axis))
                count += 1
    return count


def _centering_hook(
    inputs: int, piece: ParameterPiece, axis: Axis | None
) -> Callable[[torch.Tensor], torch.Tensor]:
    def hook(gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.sum(dim=inputs, keepdim=True, dtype=torch.float32)
        if axis is not None and gradient.shape[inputs] != piece.shape[inputs]:
            dist.all_reduce(total, group=axis.group)
        mean = total / piece.shape[inputs]
        return gradient.sub(mean.to(gradient.dtype))

    return hook


def elementwise_change(
    config: GradientsConfig, *, seed: int, update: int, scale: float
) -> Callable[[ElementRange, torch.Tensor], None] | None:
    """Return the function that changes every gradient element at one update; None without changes.

    Args:
        config: Clipping by value, then noise.
        update: Number of the update, from 0.
        scale: Loss scale that the gradients are multiplied by.
    """
    if config.clip_value == 0 and config.noise == 0:
        return None
    deviation = math.sqrt(config.noise / (1 + update) ** config.noise_decay)

    def change(place: ElementRange, values: torch.Tensor) -> None:
        if config.clip_value > 0:
            values.clamp_(-config.clip_value * scale, config.clip_value * scale)
        for first in range(0, place.numel if config.noise > 0 else 0, _AT_ONCE):
            part = values[first : first + _AT_ONCE]
            there = replace(place, start=place.start + first, numel=part.numel())
            noise = standard_normal(f"{seed}/{update}/{place.name}", there.indices(values.device))
            part.add_((noise * (deviation * scale)).to(values.dtype))

    return change


def standard_normal(key: str, indices: torch.Tensor) -> torch.Tensor:
    """Return standard normal numbers that depend on `key` and an index alone, in fp32.

    Every rank that holds an element draws the same number for it. 48 bits of a hash of the index
    give two uniform numbers, and these give a normal one (Box and Muller, 1958).
    """
    digest = hashlib.sha256(key.encode()).digest()
    start = int.from_bytes(digest[:8], "little")
    bits = _splitmix64(indices * _as_int64(_GOLDEN) + _as_int64(start))
    first = ((bits >> 40) & (_MANTISSA - 1)).add_(1).float() / _MANTISSA  # in (0, 1]
    second = ((bits >> 16) & (_MANTISSA - 1)).float() / _MANTISSA
    return (-2 * first.log()).sqrt_() * (2 * math.pi * second).cos_()


def _splitmix64(values: torch.Tensor) -> torch.Tensor:
    """Return splitmix64's finalizer of int64 values; products wrap around as unsigned ones do."""
    values = (values ^ _logical_shift_right(values, 30)) * _as_int64(_FIRST)
    values = (values ^ _logical_shift_right(values, 27)) * _as_int64(_SECOND)
    return values ^ _logical_shift_right(values, 31)


def _logical_shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the values shifted right without their sign (logical shift)."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value
