"""What the optimizer holds, by the names that a checkpoint has for it.

Where it lies is the engine's business (`trainctl.engines.protocol.States`): a rank holds some flat
tensors that the optimizer updates, and fragments of parameters in them. Here are the names of the
states, those that are one number, the average of the weights, and what an optimizer of trainctl's
own keeps beside.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from trainctl.config.schema import OptimizerConfig
from trainctl.engines.fragments import Fragment
from trainctl.engines.protocol import Engine
from trainctl.options.optimizer import spec_of
from trainctl.train.optimizers.partitioned import ParameterPart, PartitionedOptimizer, SideState

MASTER = "master"
"""Name of the master weights among the states."""
AVERAGE = "average"
"""Name of the moving average of the master weights, where the run keeps one."""
CODES = ".codes"
"""End of the names of states that are bytes."""


class OptimizerState:
    """The flat tensors of this rank's optimizer and the fragments in them.

    Args:
        engine: The engine.
        config: Of the optimizer.

    Attributes:
        optimizer: The one that makes the update.
        tensors: Those that it updates, flat.
        fragments: Which elements of which parameters lie where in them.
        is_swapped: Whether some of them lie on NVMe between uses: their values are there only
            within `resident`.
    """

    def __init__(self, engine: Engine, config: OptimizerConfig) -> None:
        self._engine, self._config, self._states = engine, config, engine.states
        self.optimizer = self._states.optimizer
        self.tensors, self.fragments = self._states.tensors, self._states.fragments
        self._averages: list[torch.Tensor] = []
        self.is_swapped = any(map(self._states.is_swapped, range(len(self.tensors))))
        if isinstance(self.optimizer, PartitionedOptimizer):
            replicas = engine.mesh.replicas if self._states.are_partitioned else None
            self.optimizer.bind(self._parts(), replicas)

    def keep_average(self) -> None:
        """Keep an average of the master weights from now on: of each tensor, one more state."""
        self._averages = [tensor.detach().to(torch.float32, copy=True) for tensor in self.tensors]

    def settle(self) -> None:
        """Bring the master weights up to date, before they are saved."""
        self._states.settle()

    def publish(self) -> None:
        """Let the model's parameters follow the master weights, as an update does; on all ranks."""
        self._states.publish()

    def saved(self, index: int, state: str) -> torch.Tensor:
        """What a checkpoint holds of an optimizer's tensor, or of one of its states; flat."""
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
        """Return names of the states of one of the tensors that are as large as it, such as
        exp_avg.

        They are the same whoever makes the update. Before the first step at most the average.
        """
        self._states.check_readable()
        states = self._states.updater(index).optimizer.state.get(self.tensors[index], {})
        kept = [AVERAGE] if self._averages else []
        return [name for name in self.wanted_names(index) if name in states] + kept

    def wanted_names(self, index: int) -> tuple[str, ...]:
        """Those that it has once there was a step."""
        uses_muon = bool(self._states.group(index).get("uses_muon", False))
        return spec_of(self._config).states_of(self._config, is_matrix=uses_muon)

    def all_names(self) -> set[str]:
        """Return names of all states that this rank has once there was a step, of whatever size."""
        names = {name for index in range(len(self.tensors)) for name in self.wanted_names(index)}
        return names.union(*(self.sides(fragment) for fragment in self.fragments))

    def sides(self, fragment: Fragment) -> dict[str, SideState]:
        """States of a fragment that are not as large as it; writing to them changes them."""
        if not isinstance(self.optimizer, PartitionedOptimizer):
            return {}
        return self.optimizer.sides(self.tensors[fragment.tensor], fragment.name)

    def scalars(self) -> dict[str, float]:
        """States that are one number for the whole optimizer, such as its step count."""
        found: dict[str, float] = {}
        for index, tensor in enumerate(self.tensors):
            updater = self._states.updater(index)
            for name, value in updater.optimizer.state.get(tensor, {}).items():
                if not _is_elementwise(value, tensor):
                    number = float(value)
                    if found.setdefault(name, number) == number:
                        continue
                    if updater.counts_alike:
                        raise RuntimeError(f"optimizer state {name} differs between parameters")
                    found[name] = max(found[name], number)
        return found

    def numel(self, index: int) -> int:
        """Return elements of one of the optimizer's tensors, wherever it lies."""
        return self._states.numel(index)

    def resident(self, index: int, *, changes: bool = False) -> AbstractContextManager[None]:
        """Within it one of the optimizer's tensors and its states are in memory.

        Args:
            changes: Whether to write them back to NVMe, if they come from there.
        """
        return self._states.resident(index, changes=changes)

    def tensor(self, index: int, state: str) -> torch.Tensor:
        """Return an optimizer's tensor or one of its states, flat; writing to it changes the
        engine's."""
        master = self.tensors[index]
        if state == AVERAGE:
            return self._averages[index].view(-1)
        if state == MASTER:
            return master.detach().view(-1)
        value: torch.Tensor = self._states.updater(index).optimizer.state[master][state]
        return value.detach().view(-1)

    def create(self, index: int, scalars: dict[str, float]) -> None:
        """Make the states that the optimizer would make at its first step, to be loaded into."""
        tensor, updater = self.tensors[index], self._states.updater(index)
        numbers = {name: updater.step_count(tensor, value) for name, value in scalars.items()}
        kept_in = updater.state_type(tensor)
        kinds = {
            name: torch.uint8 if name.endswith(CODES) else kept_in
            for name in self.wanted_names(index)
        }
        held = updater.optimizer.state.get(tensor)
        if held and kinds.keys() <= held.keys():
            # In a running engine: DeepSpeed's swapper goes on with the tensors that it knows.
            held.update(numbers)
            return
        updater.optimizer.state[tensor] = {
            **numbers,
            **{name: torch.zeros_like(tensor, dtype=kind).detach() for name, kind in kinds.items()},
        }

    def catch_up(self, scalars: dict[str, float]) -> None:
        """Bring the optimizer where its steps would have brought it, beyond the states."""
        self._states.catch_up(scalars)

    def _parts(self) -> dict[torch.Tensor, list[ParameterPart]]:
        """What each of the tensors has of which parameter, on all replicas."""
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
            part = ParameterPart(
                name, piece.shape, tuple(places), place, offset, piece.inputs_first
            )
            parts[self.tensors[index]].append(part)
        return parts


def _is_elementwise(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0
