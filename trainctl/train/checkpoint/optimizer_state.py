"""The optimizer's tensors and states, by the names that checkpoints use; average of the weights.

The engine decides where they lie (`trainctl.engines.protocol.States`): a rank holds flat tensors
that the optimizer updates, with fragments of parameters in them. This module knows the names of the
states, scalar states, the average of the weights, and the states of trainctl's own optimizers.

The average is sharded, saved and loaded with the other states. For an evaluation, its values are
swapped with the master weights, and swapped back afterwards. Both are fp32, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainctl.config.schema import OptimizerConfig
from trainctl.engines.process import Axis
from trainctl.engines.protocol import Engine
from trainctl.engines.shards import Fragment
from trainctl.options.optimizer import spec_of
from trainctl.plans.settings import ema_decay
from trainctl.train.optimizers.partitioned import ParameterPart, PartitionedOptimizer, SideState

MASTER = "master"
"""Name of the master weights among the states."""
AVERAGE = "average"
"""Name of the moving average of the master weights, where the run keeps one."""
CODES = ".codes"
"""Suffix of the names of states that are bytes."""


class OptimizerState:
    """The flat tensors of this rank's optimizer and the fragments in them.

    Attributes:
        optimizer: The optimizer that makes the update.
        tensors: The flat tensors that it updates.
        fragments: Positions of parameters' elements in the tensors.
        is_swapped: Whether some tensors lie on NVMe between uses; their values are then available
            only within `swapped_in`.
    """

    def __init__(self, engine: Engine, config: OptimizerConfig) -> None:
        self._engine, self._config, self._states = engine, config, engine.states
        self.optimizer = self._states.optimizer
        self.tensors, self.fragments = self._states.tensors, self._states.fragments
        self.numel, self.swapped_in = self._states.numel, self._states.swapped_in
        self.sync_master_weights = self._states.sync_master_weights
        self.copy_masters_to_parameters = self._states.copy_masters_to_parameters
        self.restore_scalars = self._states.restore_scalars
        self._averages: list[torch.Tensor] = []
        self.is_swapped = any(map(self._states.is_swapped, range(len(self.tensors))))
        if isinstance(self.optimizer, PartitionedOptimizer):
            mesh, replicas, holders = engine.mesh, None, None
            tensor = mesh.tensor if mesh.tensor.size > 1 else None
            if self._states.are_partitioned:
                replicas = mesh.replicas
            if tensor is not None:
                holders = mesh.join_stage() if replicas else tensor
            self.optimizer.bind(self._parts(tensor), replicas, tensor, holders)

    def keep_average(self) -> None:
        """Keep an average of the master weights from now on: one more state of each tensor."""
        self._averages = [tensor.detach().to(torch.float32, copy=True) for tensor in self.tensors]

    def saved(self, index: int, state: str) -> torch.Tensor:
        """Return an optimizer tensor, or one of its states, as a checkpoint stores it; flat."""
        tensor = self.tensor(index, state)
        turned = [f for f in self.fragments if f.tensor == index and f.columns]
        if not turned:
            return tensor
        copy = tensor.clone()
        for fragment in turned:
            end = fragment.offset + fragment.numel
            copy[fragment.offset : end] = fragment.of(tensor).reshape(-1)
        return copy

    def state_names(self, index: int) -> list[str]:
        """Return the names of a tensor's states that are as large as the tensor, such as exp_avg.

        The names do not depend on which code makes the update. Before the first step there is
        at most the average.
        """
        self._states.check_readable()
        states = self._states.updater(index).optimizer.state.get(self.tensors[index], {})
        kept = [AVERAGE] if self._averages else []
        return [name for name in self.wanted_names(index) if name in states] + kept

    def wanted_names(self, index: int) -> tuple[str, ...]:
        """Return the names of the states that a tensor has after the first step."""
        uses_muon = bool(self._states.group(index).get("uses_muon", False))
        return spec_of(self._config).states_of(self._config, is_matrix=uses_muon)

    def all_names(self) -> set[str]:
        """Return the names of all states of this rank after the first step, of any size."""
        names = {name for index in range(len(self.tensors)) for name in self.wanted_names(index)}
        return names.union(*(self.sides(fragment) for fragment in self.fragments))

    def sides(self, fragment: Fragment) -> dict[str, SideState]:
        """Return the states of a fragment that are not elementwise; they are writable views."""
        if not isinstance(self.optimizer, PartitionedOptimizer):
            return {}
        return self.optimizer.sides(self.tensors[fragment.tensor], fragment.name)

    def scalars(self) -> dict[str, float]:
        """Return the states that are one number for the whole optimizer, such as its step count."""
        found: dict[str, float] = {}
        for index, tensor in enumerate(self.tensors):
            updater = self._states.updater(index)
            for name, value in updater.optimizer.state.get(tensor, {}).items():
                if not _is_elementwise(value, tensor):
                    number = float(value)
                    if found.setdefault(name, number) == number:
                        continue
                    if updater.has_uniform_step_count:
                        raise RuntimeError(f"optimizer state {name} differs between parameters")
                    found[name] = max(found[name], number)
        return found

    def tensor(self, index: int, state: str) -> torch.Tensor:
        """Return a writable view of an optimizer tensor or of one of its states, flat."""
        master = self.tensors[index]
        if state == AVERAGE:
            return self._averages[index].view(-1)
        if state == MASTER:
            return master.detach().view(-1)
        value: torch.Tensor = self._states.updater(index).optimizer.state[master][state]
        return value.detach().view(-1)

    def create(self, index: int, scalars: dict[str, float]) -> None:
        """Create the states of the optimizer's first step, to load values into."""
        tensor, updater = self.tensors[index], self._states.updater(index)
        numbers = {name: updater.step_count(tensor, value) for name, value in scalars.items()}
        kept_in = updater.state_type(tensor)
        kinds = {
            name: torch.uint8 if name.endswith(CODES) else kept_in
            for name in self.wanted_names(index)
        }
        held = updater.optimizer.state.get(tensor)
        if held and kinds.keys() <= held.keys():
            # In a running engine DeepSpeed's swapper keeps using the tensors that it knows.
            held.update(numbers)
            return
        updater.optimizer.state[tensor] = {
            **numbers,
            **{name: torch.zeros_like(tensor, dtype=kind).detach() for name, kind in kinds.items()},
        }

    def _parts(self, shards: Axis | None) -> dict[torch.Tensor, list[ParameterPart]]:
        """Return the parameter parts in each tensor; all ranks of a stage call this together.

        Args:
            shards: Tensor ranks; None with a single one.
        """
        pieces = {piece.name: piece for piece in self._engine.pieces.values()}
        mine = [(f.tensor, f.name, f.start, f.start + f.numel) for f in self.fragments]
        offsets = {(f.tensor, f.name): f.offset for f in self.fragments}
        replicas, place = [mine], 0
        if self._states.are_partitioned:
            axis = self._engine.mesh.replicas
            replicas, place = [[] for _ in axis.ranks], axis.index
            dist.all_gather_object(replicas, mine, group=axis.group)
        ranges: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for replica, listed in enumerate(replicas):
            for tensor, name, start, end in listed:
                places = ranges.setdefault((tensor, name), [(0, 0)] * len(replicas))
                places[replica] = (start, end)
        parts: dict[torch.Tensor, list[ParameterPart]] = {tensor: [] for tensor in self.tensors}
        for (index, name), places in ranges.items():
            piece, offset = pieces[name], offsets.get((index, name), 0)
            shard = None if piece.shard.is_whole else piece.shard
            part = ParameterPart(
                name, piece.shape, tuple(places), place, offset, piece.inputs_first, shard
            )
            parts[self.tensors[index]].append(part)
        if shards is not None:
            names = [[part.name for part in parts[tensor]] for tensor in self.tensors]
            everywhere: list[Any] = [None] * shards.size
            dist.all_gather_object(everywhere, names, group=shards.group)
            # Otherwise sums of different parameters would meet.
            assert all(each == names for each in everywhere), "tensor ranks update other parameters"
        return parts


def _is_elementwise(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


_AT_ONCE = 1 << 22
"""Elements swapped at a time, which bounds the extra memory."""


class WeightAverage:
    """Moving average of a run's weights; all ranks call the same methods in the same order.

    Args:
        state: State of the optimizer, which keeps the average from now on.
        decay: Upper bound of the decay; the first updates use less (`ema_decay`).
        every_steps: Accepted optimizer steps between two updates of the average.

    Attributes:
        steps: Accepted optimizer steps so far.
    """

    def __init__(self, state: OptimizerState, *, decay: float, every_steps: int) -> None:
        self._state = state
        self._decay, self._every_steps = decay, every_steps
        self.steps = 0
        state.keep_average()

    def restore(self, saved: Mapping[str, int]) -> None:
        """Restore the step count from a checkpoint; the values are loaded with the other states."""
        self.steps = saved.get("steps", 0)

    def saved(self) -> dict[str, int]:
        """Return the entry for a checkpoint's manifest."""
        return {"steps": self.steps}

    @torch.no_grad()
    def update_average(self) -> None:
        """Count an accepted optimizer step; every `every_steps` steps, update the average."""
        self.steps += 1
        if self.steps % self._every_steps:
            return
        decay = ema_decay(self.steps // self._every_steps, self._decay)
        for index in range(len(self._state.tensors)):
            average = self._state.tensor(index, AVERAGE)
            average.mul_(decay).add_(self._state.tensor(index, MASTER), alpha=1 - decay)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Swap the average into the model within the context; do not update or save there."""
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        for index in range(len(self._state.tensors)):
            masters = self._state.tensor(index, MASTER).split(_AT_ONCE)
            averages = self._state.tensor(index, AVERAGE).split(_AT_ONCE)
            for master, average in zip(masters, averages, strict=True):
                held = master.clone()
                master.copy_(average)
                average.copy_(held)
        self._state.copy_masters_to_parameters()
