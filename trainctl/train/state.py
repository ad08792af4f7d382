"""What the optimizer holds, in terms that no layout leaks into.

Whatever the ZeRO stage, a rank holds some flat fp32 tensors that the optimizer updates. A
`Fragment` says which elements of which parameter lie where in them; the master weights and every
optimizer state share that geometry. Saving and loading need nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from trainctl.train.build import partition_range
from trainctl.train.engine import Engine

MASTER = "master"
"""Name of the master weights among the states."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A range of one parameter inside one of the optimizer's tensors.

    Attributes:
        name: Canonical name of the parameter.
        start: First element, in the flattened parameter.
        numel: Number of elements.
        tensor: Index of the optimizer's tensor on this rank.
        offset: First element in that tensor, flattened.
        owned: Whether this rank is the one that saves it.
    """

    name: str
    start: int
    numel: int
    tensor: int
    offset: int
    owned: bool


class OptimizerState:
    """The flat tensors of this rank's optimizer and the fragments in them.

    Attributes:
        optimizer: The one that makes the update, inside DeepSpeed's wrapper.
        tensors: Those that it updates, flat.
        fragments: Which elements of which parameters lie where in them.
        is_swapped: Whether some of them lie on NVMe between uses: their values are there only
            within `resident`.
    """

    def __init__(self, engine: Engine, rank: int, world_size: int) -> None:
        self._engine = engine
        wrapper = engine.deepspeed.optimizer
        self.optimizer: torch.optim.Optimizer = getattr(wrapper, "optimizer", wrapper)
        if engine.stage == 3:
            self.tensors = list(wrapper.fp32_partitioned_groups_flat)
            self.fragments = list(_fragments_of_stage_3(engine))
        elif engine.stage > 0:
            self.tensors = list(wrapper.single_partition_of_fp32_groups)
            self.fragments = list(_fragments_of_stages_1_and_2(engine))
        else:
            pairs = _pairs_of_stage_0(engine)
            self.tensors = [master for _, master in pairs]
            # Every rank holds everything: the parameters are dealt out for saving.
            self.fragments = [
                Fragment(engine.names[p], 0, p.numel(), index, 0, owned=index % world_size == rank)
                for index, (p, _) in enumerate(pairs)
            ]
        self.is_swapped = any(self._is_on_nvme(index) for index in range(len(self.tensors)))

    def state_names(self) -> list[str]:
        """Names of the optimizer's tensor states, such as exp_avg; empty before the first step."""
        for tensor in self.tensors:
            states = self.optimizer.state.get(tensor, {})
            return [name for name, value in states.items() if _is_elementwise(value, tensor)]
        return []

    def scalars(self) -> dict[str, float]:
        """States that are one number for the whole optimizer, such as its step count."""
        found: dict[str, float] = {}
        for tensor in self.tensors:
            for name, value in self.optimizer.state.get(tensor, {}).items():
                if not _is_elementwise(value, tensor):
                    number = float(value)
                    if found.setdefault(name, number) != number:
                        raise RuntimeError(f"optimizer state {name} differs between parameters")
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
        value = master if state == MASTER else self.optimizer.state[master][state]
        return value.detach().view(-1)

    def create(self, index: int, names: list[str], scalars: dict[str, float]) -> None:
        """Make the states that the optimizer would make at its first step, to be loaded into."""
        tensor = self.tensors[index]
        self.optimizer.state[tensor] = {
            **{name: self._scalar(value) for name, value in scalars.items()},
            **{name: torch.zeros_like(tensor, requires_grad=False) for name in names},
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

    def _scalar(self, value: float) -> torch.Tensor | int:
        # CPUAdam counts steps in an int; torch in a tensor on the CPU.
        if isinstance(self.optimizer, DeepSpeedCPUAdam):
            return int(value)
        return torch.tensor(value, dtype=torch.float32)

    def _is_on_nvme(self, index: int) -> bool:
        """Whether DeepSpeed swaps the tensor: the small ones stay in memory."""
        wrapper = self._engine.deepspeed.optimizer
        return self._engine.stage == 3 and wrapper._swappable_optimizer_subgroup(index)


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


def _fragments_of_stages_1_and_2(engine: Engine) -> Iterator[Fragment]:
    wrapper = engine.deepspeed.optimizer
    for index, group in enumerate(wrapper.bit16_groups):
        for parameter in group:
            mapping = parameter._hp_mapping  # None: no part of it is in this rank's partition
            if mapping is not None:
                inside, place = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                yield Fragment(
                    engine.names[parameter], inside.start, inside.numel, index, place.start, True
                )


def _fragments_of_stage_3(engine: Engine) -> Iterator[Fragment]:
    wrapper = engine.deepspeed.optimizer
    for group in wrapper.fp16_groups:
        for parameter in group:
            index, offset, _ = wrapper.grad_position[wrapper.get_param_id(parameter)]
            start, end = partition_range(parameter)
            if end > start:
                yield Fragment(engine.names[parameter], start, end - start, index, offset, True)
