"""What the optimizer holds, in terms that no layout leaks into.

Whatever the ZeRO stage, a rank holds some flat fp32 tensors that the optimizer updates. A
`Fragment` says which elements of which parameter lie where in them; the master weights and every
optimizer state share that geometry. Saving and loading need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from trainctl.engines.shards import Piece, Shard
from trainctl.errors import TrainctlError
from trainctl.options.optimizer import spec_of
from trainctl.train.build import partition_range
from trainctl.train.engine import Engine
from trainctl.train.optimizers.partitioned import Part, PartitionedOptimizer, Side

MASTER = "master"
"""Name of the master weights among the states."""
AVERAGE = "average"
"""Name of the moving average of the master weights, where the run keeps one."""
CODES = ".codes"
"""End of the names of states that are bytes."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of one parameter (of this rank's shard) inside one of the optimizer's tensors.

    Attributes:
        name: Canonical name of the parameter.
        start: First element, in this rank's shard of the parameter, flattened.
        numel: Number of elements.
        tensor: Index of the optimizer's tensor on this rank.
        offset: First element in that tensor, flattened.
        owned: Whether this rank is the one that saves it.
        shard: The part of the parameter that this rank has; None means all of it.
        columns: If not 0, the range is a block of that many columns of a matrix, and lies
            transposed in the optimizer's tensor.
    """

    name: str
    start: int
    numel: int
    tensor: int
    offset: int
    owned: bool
    shard: Shard | None = None
    columns: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Its elements in one of the optimizer's tensors: a view, of any shape, in their order."""
        values = tensor[self.offset : self.offset + self.numel]
        return values.view(self.columns, -1).t() if self.columns else values


class OptimizerState:
    """The flat tensors of this rank's optimizer and the fragments in them.

    Attributes:
        optimizer: The one that makes the update, inside DeepSpeed's wrapper.
        tensors: Those that it updates, flat.
        fragments: Which elements of which parameters lie where in them.
        is_swapped: Whether some of them lie on NVMe between uses: their values are there only
            within `resident`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        wrapper = engine.deepspeed.optimizer
        self.optimizer: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        if engine.stage == 3:
            self.tensors = list(wrapper.fp32_partitioned_groups_flat)
            self.fragments = list(_fragments_of_stage_3(engine))
        elif engine.stage > 0:
            # Stage 1 with bf16 weights and fp32 gradients has a wrapper of its own.
            is_bf16 = isinstance(wrapper, BF16_Optimizer)
            masters = "fp32_groups_flat_partition" if is_bf16 else "single_partition_of_fp32_groups"
            models = wrapper.bf16_groups if is_bf16 else wrapper.bit16_groups
            self.tensors = list(getattr(wrapper, masters))
            fragments = _fragments_of_stages_1_and_2(engine, models)
            if engine.has_zenflow:
                shapes = {piece.name: piece.shape for piece in engine.pieces.values()}
                fragments = (part for f in fragments for part in _of_transposed(f, shapes[f.name]))
            self.fragments = list(fragments)
        else:
            pairs = _pairs_of_stage_0(engine)
            self.tensors = [master for _, master in pairs]
            # Every replica holds everything: the parameters are dealt out to them for saving.
            replicas = engine.mesh.replicas
            self.fragments = [
                _fragment(
                    engine.pieces[p],
                    0,
                    p.numel(),
                    index,
                    0,
                    dealt=index % replicas.size == replicas.index,
                )
                for index, (p, _) in enumerate(pairs)
            ]
        self._averages: list[torch.Tensor] = []
        self.is_swapped = any(self._is_on_nvme(index) for index in range(len(self.tensors)))
        if isinstance(self.optimizer, PartitionedOptimizer):
            self.optimizer.bind(self._parts(), engine.mesh.replicas if engine.stage > 0 else None)

    def keep_average(self) -> None:
        """Keep an average of the master weights from now on: of each tensor, one more state."""
        self._averages = [tensor.detach().to(torch.float32, copy=True) for tensor in self.tensors]

    def settle(self) -> None:
        """Bring the master weights up to date, before they are saved."""
        if self._engine.has_zenflow:
            self._engine.deepspeed.optimizer.sync_fp32_param_from_gpu()

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
        """Names of the states of one of the tensors that are as large as it, such as exp_avg.

        They are the same whoever makes the update. Before the first step at most the average.
        """
        if self._is_elsewhere:
            raise TrainctlError(
                "with offload.super_offload the moments are in a process that gives them to "
                "nobody: no checkpoint can be saved",
                hint="offload.super_offload=false",
            )
        states = self._updater(index).state.get(self.tensors[index], {})
        kept = [AVERAGE] if self._averages else []
        return [name for name in self.wanted_names(index) if name in states] + kept

    def wanted_names(self, index: int) -> tuple[str, ...]:
        """Those that it has once there was a step."""
        uses_muon = bool(self._group(index).get("uses_muon", False))
        section = self._engine.config.optimizer
        return spec_of(section).states_of(section, is_matrix=uses_muon)

    def all_names(self) -> set[str]:
        """Names of all states that this rank has once there was a step, of whatever size."""
        names = {name for index in range(len(self.tensors)) for name in self.wanted_names(index)}
        return names.union(*(self.sides(fragment) for fragment in self.fragments))

    def sides(self, fragment: Fragment) -> dict[str, Side]:
        """States of a fragment that are not as large as it; writing to them changes them."""
        if not isinstance(self.optimizer, PartitionedOptimizer):
            return {}
        return self.optimizer.sides(self.tensors[fragment.tensor], fragment.name)

    def scalars(self) -> dict[str, float]:
        """States that are one number for the whole optimizer, such as its step count."""
        found: dict[str, float] = {}
        for index, tensor in enumerate(self.tensors):
            updater = self._updater(index)
            for name, value in updater.state.get(tensor, {}).items():
                if not _is_elementwise(value, tensor):
                    number = float(value)
                    if found.setdefault(name, number) == number:
                        continue
                    if not isinstance(updater, FusedLion):
                        raise RuntimeError(f"optimizer state {name} differs between parameters")
                    # It counts on the last parameter of a group alone, and does not use it.
                    found[name] = max(found[name], number)
        return found

    def numel(self, index: int) -> int:
        """Elements of one of the optimizer's tensors, wherever it lies."""
        if self._is_on_nvme(index):
            return int(self._engine.deepspeed.optimizer.fp16_partitioned_groups_flat_numel[index])
        return self.tensors[index].numel()

    @contextmanager
    def resident(self, index: int, *, changes: bool = False) -> Iterator[None]:
        """Within it one of the optimizer's tensors and its states are in memory.

        Args:
            index: Of the tensor.
            changes: Whether to write them back to NVMe, if they come from there.
        """
        if not self._is_on_nvme(index):
            yield
            return
        wrapper = self._engine.deepspeed.optimizer
        wrapper._optimizer_states_and_gradient_swap_in(index)
        yield
        if changes:
            wrapper._optimizer_states_and_gradient_swap_out(index)
        else:
            wrapper._release_swap_buffers(index)

    def tensor(self, index: int, state: str) -> torch.Tensor:
        """An optimizer's tensor or one of its states, flat; writing to it changes the engine's."""
        master = self.tensors[index]
        if state == AVERAGE:
            return self._averages[index].view(-1)
        value = master if state == MASTER else self._updater(index).state[master][state]
        return value.detach().view(-1)

    def create(self, index: int, scalars: dict[str, float]) -> None:
        """Make the states that the optimizer would make at its first step, to be loaded into."""
        tensor, updater = self.tensors[index], self._updater(index)
        kept_in = tensor.dtype
        if isinstance(updater, DeepSpeedCPUAdam) and updater.fp32_optimizer_states:
            kept_in = torch.float32  # also under bf16 master weights
        kinds = {
            name: torch.uint8 if name.endswith(CODES) else kept_in
            for name in self.wanted_names(index)
        }
        held = updater.state.get(tensor)
        if held and kinds.keys() <= held.keys():
            # In a running engine: DeepSpeed's swapper goes on with the tensors that it knows.
            held.update((name, _scalar(updater, tensor, value)) for name, value in scalars.items())
            return
        updater.state[tensor] = {
            **{name: _scalar(updater, tensor, value) for name, value in scalars.items()},
            **{name: torch.zeros_like(tensor, dtype=kind).detach() for name, kind in kinds.items()},
        }

    def catch_up(self, scalars: dict[str, float]) -> None:
        """Bring the optimizer where its steps would have brought it, beyond the states.

        CPUAdam keeps the powers of its betas as running products in fp32 (csrc/includes/
        cpu_adam.h, IncrementStep); a power computed at once differs in the last bit.
        """
        if isinstance(self.optimizer, DeepSpeedCPUAdam):
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

    def _parts(self) -> dict[torch.Tensor, list[Part]]:
        """What each of the tensors has of which parameter, on all replicas."""
        pieces = {piece.name: piece for piece in self._engine.pieces.values()}
        mine = [(f.tensor, f.name, f.start, f.start + f.numel) for f in self.fragments]
        offsets = {(f.tensor, f.name): f.offset for f in self.fragments}
        replicas, place = [mine], 0
        if self._engine.stage > 0:
            axis = self._engine.mesh.replicas
            replicas, place = [[] for _ in axis.ranks], axis.index
            dist.all_gather_object(replicas, mine, group=axis.group)
        ranges: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for replica, listed in enumerate(replicas):
            for tensor, name, start, end in listed:
                places = ranges.setdefault((tensor, name), [(0, 0)] * len(replicas))
                places[replica] = (start, end)
        parts: dict[torch.Tensor, list[Part]] = {tensor: [] for tensor in self.tensors}
        for (index, name), places in ranges.items():
            piece, offset = pieces[name], offsets.get((index, name), 0)
            part = Part(name, piece.shape, tuple(places), place, offset, piece.inputs_first)
            parts[self.tensors[index]].append(part)
        return parts

    def _group(self, index: int) -> dict[str, Any]:
        """The parameter group of one of the tensors."""
        wrapper, groups = self._engine.deepspeed.optimizer, self.optimizer.param_groups
        if self._engine.stage == 3:
            found: dict[str, Any] = groups[wrapper.sub_group_to_group_id[index]]
            return found
        if self._engine.stage > 0:
            return groups[index]
        return [group for group in groups for _ in group["params"]][index]

    def _updater(self, index: int) -> torch.optim.Optimizer:
        """The optimizer of one of the tensors: another on the device if only a part is offloaded.

        (zero/stage3.py, `_optimizer_step`)
        """
        wrapper = self._engine.deepspeed.optimizer
        backup = getattr(wrapper, "backup_optimizer", None)
        is_offloaded = backup is None or wrapper.subgroup_to_device[index] == "cpu"
        return self.optimizer if is_offloaded else backup

    @property
    def _is_elsewhere(self) -> bool:
        """Whether another process has the states."""
        return hasattr(self._engine.deepspeed.optimizer, "superoffload_cpu_optimizer")

    def _is_on_nvme(self, index: int) -> bool:
        """Whether DeepSpeed swaps the tensor: the small ones stay in memory."""
        wrapper = self._engine.deepspeed.optimizer
        return self._engine.stage == 3 and wrapper._swappable_optimizer_subgroup(index)


def _fragment(
    piece: Piece, start: int, numel: int, tensor: int, offset: int, *, dealt: bool = True
) -> Fragment:
    shard = None if piece.shard.is_whole else piece.shard
    owned = dealt and piece.is_saved_here
    return Fragment(piece.name, start, numel, tensor, offset, owned, shard)


def _scalar(
    optimizer: torch.optim.Optimizer, tensor: torch.Tensor, value: float
) -> torch.Tensor | int:
    """A step count as the optimizer of the tensor keeps it: DeepSpeed's as an int.

    torch's is a tensor: on the CPU, but beside the parameter where a fused kernel reads it.
    """
    if isinstance(optimizer, (DeepSpeedCPUAdam, DeepSpeedCPULion, FusedLion)):
        return int(value)
    device = tensor.device if optimizer.defaults.get("fused") else "cpu"
    return torch.tensor(value, dtype=torch.float32, device=device)


def _is_elementwise(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape and value.dim() > 0


def _pairs_of_stage_0(engine: Engine) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with the fp32 tensor that the optimizer updates: itself, or its copy."""
    wrapper = engine.deepspeed.optimizer
    if isinstance(wrapper, torch.optim.Optimizer):
        return [(p, p) for group in wrapper.param_groups for p in group["params"]]
    return [
        pair
        for models, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)
        for pair in zip(models, masters, strict=True)
    ]


def _fragments_of_stages_1_and_2(
    engine: Engine, groups: list[list[nn.Parameter]]
) -> Iterator[Fragment]:
    for index, group in enumerate(groups):
        for parameter in group:
            mapping = parameter._hp_mapping  # None: no part of it is in this rank's partition
            if mapping is not None:
                inside, place = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                piece = engine.pieces[parameter]
                yield _fragment(piece, inside.start, inside.numel, index, place.start)


def _of_transposed(fragment: Fragment, shape: torch.Size) -> Iterator[Fragment]:
    """A range of a transposed matrix: the end of a column, whole columns, the start of one."""
    if len(shape) < 2:
        yield fragment
        return
    rows, columns = shape
    position, end = fragment.start, fragment.start + fragment.numel
    while position < end:
        column, row = divmod(position, rows)
        whole = (end - position) // rows if row == 0 else 0
        numel = whole * rows or min(rows - row, end - position)
        yield replace(
            fragment,
            start=row,
            numel=numel,
            offset=fragment.offset + position - fragment.start,
            shard=Shard(columns, column, column + max(1, whole)),
            columns=whole,
        )
        position += numel


def _fragments_of_stage_3(engine: Engine) -> Iterator[Fragment]:
    wrapper = engine.deepspeed.optimizer
    for group in wrapper.fp16_groups:
        for parameter in group:
            index, offset, _ = wrapper.grad_position[wrapper.get_param_id(parameter)]
            start, end = partition_range(parameter)
            if end > start:
                yield _fragment(engine.pieces[parameter], start, end - start, index, offset)
