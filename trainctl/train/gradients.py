"""The gradients of a step between its last backward pass and its update, wherever ZeRO keeps them.

`state.OptimizerState` says which elements of which parameter lie where in the tensors that the
optimizer updates; their gradients have the same geometry. So one rule for each of DeepSpeed's
wrappers, where that gradient is, gives norms, elementwise changes and a way to drop it all.
(DeepSpeed 0.19: runtime/zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py.)
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from trainctl.config.schema import CompileKind, RunConfig
from trainctl.engines.process import Process
from trainctl.train.engine import Engine, group_key
from trainctl.train.gradient_changes import Place
from trainctl.train.state import Fragment, OptimizerState


@dataclass(frozen=True, slots=True)
class Norms:
    """Of the gradient of a step, over all ranks, each element counted once; the same on all ranks.

    Attributes:
        total: Of all parameters.
        groups: Of those of each optimizer group.
    """

    total: float
    groups: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.total)


Change = Callable[[Place, torch.Tensor], None]
"""Changes some elements of a gradient in place: flat, in any floating type."""


class Gradients:
    """The gradients of this rank's step; all ranks call the same methods in the same order.

    Args:
        engine: The engine.
        state: Its optimizer's geometry.
        process: This rank.
        config: The run's; tells the group of each parameter.

    Attributes:
        limits: Of the norms of parameter groups that have one of their own, wherever they are.
    """

    def __init__(
        self, engine: Engine, state: OptimizerState, process: Process, config: RunConfig
    ) -> None:
        self._engine, self._state, self._process = engine, state, process
        self._wrapper = engine.deepspeed.optimizer
        keys = {piece.name: group_key(piece, config) for piece in engine.pieces.values()}
        self._group_of = {name: key.name(config) for name, key in keys.items()}
        limits = {key.name(config): key.clip_at for key in keys.values() if key.clip_at}
        # A pipeline stage may have none of a group; all ranks add up the same list.
        everywhere = process.gather((sorted(set(self._group_of.values())), limits))
        self._groups = sorted(set().union(*(groups for groups, _ in everywhere)))
        self.limits: dict[str, float] = {}
        for _, found in everywhere:
            self.limits |= found
        self._holder = _holder(engine, state, config)

    @property
    def are_visible(self) -> bool:
        """Whether they can be looked at before the update: not where another process has them."""
        return self._holder is not None

    @property
    def scale(self) -> float:
        """What they are multiplied by, until the update divides by it: the loss scale of fp16."""
        scaler = getattr(self._wrapper, "torch_autocast_gradscaler", None)
        scaler = scaler or getattr(self._engine.deepspeed, "torch_autocast_z0_gradscaler", None)
        if scaler:
            return float(scaler.get_scale())
        is_zero = self._engine.stage > 0  # without ZeRO DeepSpeed scales no loss
        return float(getattr(self._wrapper, "loss_scale", 1.0)) if is_zero else 1.0

    def norms(self) -> Norms:
        """Their norms, in double precision on a CPU and fp32 elsewhere."""
        assert self._holder is not None
        self._holder.ready()
        squares: dict[str, list[torch.Tensor]] = {name: [] for name in self._groups}
        for fragment, square in self._holder.squares():
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
        """Change every element, here and in whatever copies of it decide the update."""
        assert self._holder is not None
        self._holder.ready()
        self._holder.change(change)

    def scale_groups(self, factors: Mapping[str, float]) -> None:
        """Multiply the gradients of parameter groups; a group that is not named keeps its own."""

        def scale(place: Place, values: torch.Tensor) -> None:
            factor = factors.get(self._group_of[place.name])
            if factor is not None:
                values.mul_(factor)

        self.change(scale)

    def discard(self) -> None:
        """Clear them as an update does, without one: weights, moments and scale stay."""
        with _without_update(self._wrapper, self._clear):
            self._engine.advance()

    def _clear(self) -> None:
        wrapper, stage = self._wrapper, self._engine.stage
        if stage == 3:
            wrapper._pre_step()
            wrapper._partition_all_parameters()
            wrapper._overflow_clean_up(wrapper.loss_scale)
            wrapper.inf_or_nan_tracker.zero_()  # where fp16 notes what it has seen
        elif stage > 0 and not isinstance(wrapper, BF16_Optimizer):
            wrapper.micro_step_id = -1  # INITIAL_MICRO_STEP_ID
            wrapper._wait_for_offload_copies()
            wrapper.zero_grad(set_to_none=True)
            wrapper._release_preflattened_grad_buffers()
            if wrapper.cpu_offload:
                wrapper._offload_accumulated_param_ids = set()
                wrapper.reset_cpu_buffers()
            else:
                for index in wrapper.averaged_gradients:
                    wrapper.averaged_gradients[index] = None
                    wrapper.all_grad_tensors[index] = None
        else:
            wrapper.zero_grad()


@contextmanager
def _without_update(wrapper: Any, instead: Callable[[], None]) -> Iterator[None]:
    """Within it the wrapper's step makes no update; the engine counts it, and clears up after."""
    wrapper.step = lambda *_, **__: instead()
    if hasattr(wrapper, "overflow"):
        wrapper.overflow = False
    try:
        yield
    finally:
        del wrapper.step  # the class's own is seen again


def _added_up(columns: list[list[torch.Tensor]]) -> list[float]:
    """The sum of each list of scalars; read once, since the host waits for the device there."""
    totals = _totals([column for column in columns if column])
    read = iter(totals.tolist())
    return [next(read) if column else 0.0 for column in columns]


def _totals(columns: list[list[torch.Tensor]]) -> torch.Tensor:
    """The sum of each list, none empty; on the device if a partly offloaded optimizer has both."""
    devices = {value.device for column in columns for value in column}
    device = max(devices, key=lambda each: each.type != "cpu", default=torch.device("cpu"))
    sums = [torch.stack([value.to(device) for value in column]).sum() for column in columns]
    return torch.stack(sums) if sums else torch.zeros(0, device=device)


def _all_finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _square(values: torch.Tensor) -> torch.Tensor:
    """Their summed squares; over a large tensor torch's fp32 norm is off by 1e-4 on a CPU."""
    kind = torch.float64 if values.device.type == "cpu" else torch.float32
    return torch.linalg.vector_norm(values.detach(), dtype=kind).double().square()


class _Holder:
    """Where the gradient of each of the optimizer's tensors is.

    Args:
        engine: The engine.
        state: Its optimizer's geometry.
    """

    def __init__(self, engine: Engine, state: OptimizerState) -> None:
        self._state = state
        self._wrapper = engine.deepspeed.optimizer
        self._pieces = engine.pieces
        self._parameters = {piece.name: p for p, piece in engine.pieces.items()}
        self._fragments: dict[int, list[Fragment]] = {}
        for fragment in state.fragments:
            self._fragments.setdefault(fragment.tensor, []).append(fragment)

    def parts(self, index: int) -> list[torch.Tensor]:
        """The gradient of a tensor, as parts that follow each other; empty if it has none."""
        raise NotImplementedError

    def ready(self) -> None:
        """Wait until it is there."""

    def squares(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        """Fragments that this rank counts, and summed squares of their gradients, to be added."""
        for index in self._fragments:
            for fragment, _, values in self._cut(index):
                if fragment.owned:
                    yield fragment, _square(values)

    def change(self, change: Change) -> None:
        """Change every element."""
        for index in self._fragments:
            self._change(index, change)

    def _change(self, index: int, change: Change) -> None:
        for fragment, start, values in self._cut(index):
            change(Place(fragment.name, fragment.shard, start, values.numel()), values)

    def _cut(self, index: int) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        """The gradient of a tensor: fragment, first element's place in the parameter, values."""
        parts = [part.view(-1) for part in self.parts(index)]
        ends = list(accumulate(part.numel() for part in parts))
        for fragment in self._fragments[index]:
            offset, last = fragment.offset, fragment.offset + fragment.numel
            while offset < last and ends and offset < ends[-1]:
                number = bisect_right(ends, offset)
                begin, end = ends[number] - parts[number].numel(), min(last, ends[number])
                start = fragment.start + offset - fragment.offset
                yield fragment, start, parts[number][offset - begin : end - begin]
                offset = end


class _Whole(_Holder):
    """Without ZeRO: the gradient of each parameter itself, the same on every replica."""

    def parts(self, index: int) -> list[torch.Tensor]:
        gradients = []
        for fragment in self._fragments[index]:
            parameter = self._parameters[fragment.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients


class _OfBf16Optimizer(_Holder):
    """`BF16_Optimizer`: whole on every replica in fp32, of which the update takes the partition."""

    def parts(self, index: int) -> list[torch.Tensor]:
        return [self._wrapper.fp32_groups_gradient_flat_partition[index]]

    def change(self, change: Change) -> None:
        """All of it, and not the partition alone: its norm, for clipping, is of the whole."""
        for group, gradients in zip(
            self._wrapper.bf16_groups, self._wrapper.fp32_groups_gradients, strict=True
        ):
            for parameter, gradient in zip(group, gradients, strict=True):
                piece = self._pieces[parameter]
                shard = None if piece.shard.is_whole else piece.shard
                change(Place(piece.name, shard, 0, gradient.numel()), gradient.view(-1))


class _OfPartition(_Holder):
    """ZeRO 1 and 2, and 3 on the device: averaged, and cut as the optimizer's tensors are."""

    def parts(self, index: int) -> list[torch.Tensor]:
        held = self._wrapper.averaged_gradients[index]
        flat = getattr(held, "flat_partition", None)
        return list(held) if flat is None else [flat]


class _OfOffload(_Holder):
    """In host memory: what the update reads, and the norms that DeepSpeed took on the way there."""

    def ready(self) -> None:
        wait = getattr(self._wrapper, "_wait_for_offload_copies", None)
        if wait is not None:
            wait()

    def parts(self, index: int) -> list[torch.Tensor]:
        gradient = self._state.tensors[index].grad
        return [] if gradient is None else [gradient]

    def squares(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        for index, fragments in self._fragments.items():
            if not self._is_on_nvme(index):
                for fragment, _, values in self._cut(index):
                    if fragment.owned:
                        yield fragment, _square(values)
                continue
            for fragment in fragments:  # not read back for this alone
                norm = self._wrapper.norm_for_param_grads.get(self._key(fragment))
                if fragment.owned and norm is not None:
                    yield fragment, torch.as_tensor(norm).double().cpu().square()

    def _change(self, index: int, change: Change) -> None:
        on_nvme = self._is_on_nvme(index)
        if on_nvme:
            self._wrapper._optimizer_states_and_gradient_swap_in(index)
        super()._change(index, change)
        for fragment, _, values in self._cut(index):  # one piece each: the gradient is flat here
            self._wrapper.norm_for_param_grads[self._key(fragment)] = _square(values).sqrt().float()
        if on_nvme:
            self._wrapper._writeback_swap_state(index, write_opt_state=False, write_gradients=True)

    def _key(self, fragment: Fragment) -> int:
        return int(self._wrapper.get_param_id(self._parameters[fragment.name]))

    def _is_on_nvme(self, index: int) -> bool:
        swaps = getattr(self._wrapper, "_swappable_optimizer_subgroup", None)
        return swaps is not None and bool(swaps(index))


def _holder(engine: Engine, state: OptimizerState, config: RunConfig) -> _Holder | None:
    """By DeepSpeed's wrapper; None where the gradients are not there to be seen (TC069)."""
    wrapper = engine.deepspeed.optimizer
    offload = config.offload
    if (
        offload.super_offload
        or offload.zenflow
        or config.kernels.compile is CompileKind.deepcompile
    ):
        return None
    if engine.stage == 0:
        return _Whole(engine, state)
    if isinstance(wrapper, BF16_Optimizer):
        return _OfBf16Optimizer(engine, state)
    offloads = wrapper.offload_optimizer if engine.stage == 3 else wrapper.cpu_offload
    return (_OfOffload if offloads else _OfPartition)(engine, state)
