"""Base of optimizers that need more of a parameter than the piece that a rank holds.

An optimizer inside ZeRO updates flat tensors, in which pieces of parameters lie one after the
other; on tensor ranks these are parameters of which each rank has a shard. `bind` tells it which
pieces lie where. It can then ask the other ranks for the rest, and so makes the same update on
every layout. DeepSpeed calls `step` on all ranks of a stage in the same order, one group or
sub-group of parameters at a time, so collectives inside it match.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from trainctl.engines.process import Axis
from trainctl.engines.shards import Shard
from trainctl.options.optimizer import WithMoments
from trainctl.plans import mup
from trainctl.plans.types import RunPlan

Group = dict[str, Any]
"""Parameter group of an optimizer."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A parameter in one of the optimizer's tensors, with its range on each replica."""

    name: str
    shape: torch.Size
    """Shape of the whole parameter."""
    ranges: tuple[tuple[int, int], ...]
    """Elements [start, end) on each replica, in their order; empty ranges are (0, 0). Without
    ZeRO, one range covers everything. On tensor ranks they are elements of this rank's shard.
    """
    index: int
    """This replica's place in `ranges`."""
    offset: int
    """Index of its first element in the tensor."""
    inputs_first: bool = False
    """Whether the matrix is (inputs, outputs), as in gpt2."""
    shard: Shard | None = None
    """This tensor rank's shard of the parameter; None if it has the whole parameter."""

    @property
    def start(self) -> int:
        return self.ranges[self.index][0]

    @property
    def end(self) -> int:
        return self.ranges[self.index][1]

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def is_here(self) -> bool:
        return self.numel > 0

    @property
    def is_cut(self) -> bool:
        """Whether several replicas hold a part of the parameter."""
        return sum(end > start for start, end in self.ranges) > 1

    @property
    def is_sharded(self) -> bool:
        """Whether each tensor rank has a shard of the parameter."""
        return self.shard is not None

    @property
    def is_first_here(self) -> bool:
        """Whether this rank holds the parameter's first element."""
        return self.is_here and self.start == 0 and (self.shard is None or self.shard.start == 0)

    def of(self, flat: Tensor) -> Tensor:
        """Return a view of its elements in an optimizer tensor or an elementwise state."""
        return flat[self.offset : self.offset + self.numel]


@dataclass(frozen=True, slots=True)
class SideState:
    """A state of a part that is not elementwise, such as a second moment per row."""

    start: int
    """Index of its first value within the state of the whole parameter."""
    values: Tensor
    """Values in fp32, one-dimensional."""
    is_saved_here: bool
    """Whether this replica saves it; another replica may have the same values."""


class PartitionedOptimizer(Optimizer):
    """Base of optimizers that see whole parameters.

    Elementwise states are in `state`, flat as the tensors are.

    Args:
        groups: Parameter groups; their `lr` is set before each step.
        defaults: Defaults of the groups' other keys.
    """

    def __init__(self, groups: Iterable[Group], defaults: Mapping[str, Any]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, **defaults})
        self.replicas: Axis | None = None
        self.tensor: Axis | None = None
        self.holders: Axis | None = None
        self._parts: dict[Tensor, Sequence[ParameterPart]] | None = None
        self._sides: dict[Tensor, dict[str, dict[str, Tensor]]] = {}

    def bind(
        self,
        parts: Mapping[Tensor, Sequence[ParameterPart]],
        replicas: Axis | None,
        tensor: Axis | None = None,
        holders: Axis | None = None,
    ) -> None:
        """Set which parts of parameters lie in which tensor.

        Args:
            parts: Parts in each tensor; the same parameters in the same order on all replicas and
                tensor ranks.
            replicas: Ranks that the parameters are partitioned over; None without ZeRO.
            tensor: Ranks with the other shards of the same parameters; None without any.
            holders: Ranks that hold any element of a sharded parameter: `tensor`, or the tensor
                ranks of all replicas, replica by replica.
        """
        for listed in parts.values():
            for part in listed:
                here = [each for each in part.ranges if each[1] > each[0]]
                numel = part.shape.numel()
                if part.shard is not None:
                    numel = numel // part.shard.row * part.shard.width
                assert here[0][0] == 0 and here[-1][1] == numel
                assert all(before[1] == after[0] for before, after in pairwise(here))
        self._parts = dict(parts)
        self.replicas, self.tensor, self.holders = replicas, tensor, holders

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every tensor of the groups that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                if self._parts is None:
                    # DeepSpeed makes one update while it initialises, to allocate the states.
                    assert not tensor.grad.any(), "bind the optimizer before it is used"
                    continue
                state = self.state[tensor]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                state["step"] += 1
                flat, gradient = tensor.detach().view(-1), tensor.grad.view(-1)
                self.update(tensor, flat, gradient.to(flat.dtype), group)

    @abstractmethod
    def update(self, tensor: Tensor, weights: Tensor, gradient: Tensor, group: Group) -> None:
        """Update one tensor in place.

        Args:
            weights: Its values, flat.
            gradient: Its gradient, flat, in the type of the weights.
        """

    def side_ranges(self, part: ParameterPart) -> dict[str, tuple[int, int, bool]]:
        """Return, for each side state of a part: its range [start, end) within the state of the
        whole parameter, and whether this replica saves it.
        """
        return {}

    def sides(self, tensor: Tensor, name: str) -> dict[str, SideState]:
        """Return the side states of a parameter in a tensor, by name, as writable views."""
        part = next(part for part in self.parts(tensor) if part.name == name)
        ranges = self.side_ranges(part)
        return {
            state: SideState(start, self.side(tensor, part, state), saved)
            for state, (start, _, saved) in ranges.items()
        }

    def side(self, tensor: Tensor, part: ParameterPart, state: str) -> Tensor:
        """Return the values of a side state, which starts as zeros."""
        found = self._sides.setdefault(tensor, {}).setdefault(part.name, {})
        if state not in found:
            start, end, _ = self.side_ranges(part)[state]
            found[state] = torch.zeros(end - start, device=tensor.device)
        return found[state]

    def parts(self, tensor: Tensor) -> Sequence[ParameterPart]:
        """Return the parts in a tensor that any replica holds."""
        assert self._parts is not None
        return self._parts[tensor]

    def elementwise(self, tensor: Tensor, name: str) -> Tensor:
        """Return a state of the tensor's size, flat, which starts as zeros."""
        state = self.state[tensor]
        if name not in state:
            state[name] = torch.zeros_like(tensor, memory_format=torch.contiguous_format)
        return state[name].view(-1)

    def reduce(
        self,
        values: Tensor,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        *,
        sharded: bool = False,
    ) -> Tensor:
        """Reduce in place over the ranks that share a parameter; a single rank changes nothing.

        Args:
            sharded: Whether the values are of sharded parameters, or of parameters that only
                replicas share.
        """
        axis = self.holders if sharded else self.replicas
        if axis is not None and values.numel():
            dist.all_reduce(values, op=op, group=axis.group)
        return values


class AdamLike(PartitionedOptimizer):
    """Base of optimizers with Adam's two moments."""

    def __init__(self, groups: Iterable[Group], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"betas": betas, "eps": eps})

    @classmethod
    def of(cls, plan: RunPlan, groups: list[Group]) -> Self:
        """Return the optimizer of a plan."""
        section = plan.config.optimizer
        assert isinstance(section, WithMoments)
        eps = mup.scaled_epsilon(plan.config, section.epsilon)
        return cls(groups, (section.beta1, section.beta2), eps)
