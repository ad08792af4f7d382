"""Adapters, one for each class of wrapper that DeepSpeed puts around an optimizer.

(DeepSpeed 0.19: runtime/engine.py, `_configure_optimizer`, chooses among bf16_optimizer.py,
fp16/unfused_optimizer.py, zero/stage_1_and_2.py, zero/stage3.py and classes derived from these.)

- ZeRO 1 and 2: one flat tensor for each parameter group, partitioned over the replicas.
- ZeRO 3: each parameter is partitioned by itself, and the optimizer's tensors are sub-groups.
- Without ZeRO: every replica holds and updates everything.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn
from torch.optim import Optimizer

from trainctl.engines.deepspeed.partition import partition_range
from trainctl.engines.deepspeed.wrapper_base import HostOptimizerMixin, Wrapper, updater_of
from trainctl.engines.protocol import Change, Updater, clipping_factor, scale_gradients
from trainctl.engines.shards import ElementRange, Fragment, split_transposed
from trainctl.errors import TrainctlError


class _ByGroups(Wrapper):
    """Adapter that finds its fragments by the mappings that DeepSpeed sets on the parameters."""

    @abstractmethod
    def _parameter_groups(self) -> list[list[nn.Parameter]]:
        """Return the model's parameters, by parameter group."""

    def _find_fragments(self) -> Iterator[Fragment]:
        for index, group in enumerate(self._parameter_groups()):
            for parameter in group:
                # The public `safe_get_full_fp32_param` reads it too, but gathers the parameter.
                mapping = parameter._hp_mapping  # None: no part of it is in this rank's partition
                if mapping is not None:
                    inside, place = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    piece = self._pieces[parameter]
                    yield Fragment.of_piece(piece, inside.start, inside.numel, index, place.start)

    def copy_masters_to_parameters(self) -> None:
        self._wrapper.update_lp_params()


class Bf16OptimizerWrapper(_ByGroups):
    """Adapter of `BF16_Optimizer`: stage 1 with bf16 weights and fp32 gradients.

    Every replica holds the whole gradient in fp32; the update reads this rank's partition of it.
    """

    @property
    def scale(self) -> float:
        """Always 1: `BF16_Optimizer` scales no loss."""
        return 1.0

    def _masters(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_groups_flat_partition)

    def _parameter_groups(self) -> list[list[nn.Parameter]]:
        return self._wrapper.bf16_groups

    def _gradient(self, index: int) -> list[torch.Tensor]:
        return [self._wrapper.fp32_groups_gradient_flat_partition[index]]

    def change(self, change: Change) -> None:
        """Change the whole gradient, not the partition alone: DeepSpeed clips by the norm of the
        whole.
        """
        for group, gradients in zip(
            self._wrapper.bf16_groups, self._wrapper.fp32_groups_gradients, strict=True
        ):
            for parameter, gradient in zip(group, gradients, strict=True):
                piece = self._pieces[parameter]
                shard = None if piece.shard.is_whole else piece.shard
                change(ElementRange(piece.name, shard, 0, gradient.numel()), gradient.view(-1))


class Stage1And2(_ByGroups):
    """Adapter of `DeepSpeedZeroOptimizer` on the device; gradients are cut as the tensors are."""

    def _masters(self) -> list[torch.Tensor]:
        return list(self._wrapper.single_partition_of_fp32_groups)

    def _parameter_groups(self) -> list[list[nn.Parameter]]:
        return self._wrapper.bit16_groups

    def _gradient(self, index: int) -> list[torch.Tensor]:
        return gradient_parts(self._wrapper.averaged_gradients[index])

    def clip(self, norm: float | None, limit: float | None) -> None:
        super().clip(norm, limit)
        if norm is not None:
            wrapper, factor = self._wrapper, clipping_factor(norm, limit)
            # DeepSpeed's own norm is another pass over the gradients. It reduces group by group,
            # and hangs if pipeline stages have different groups.
            wrapper.scaled_global_norm = lambda: norm * wrapper.loss_scale
            wrapper.unscale_and_clip_grads = lambda gradients, _: scale_gradients(
                gradients, factor / wrapper.loss_scale
            )

    def _clear(self) -> None:
        """Clear the gradients as `step` and the methods it calls do (zero/stage_1_and_2.py)."""
        wrapper = self._wrapper
        wrapper.micro_step_id = -1  # INITIAL_MICRO_STEP_ID
        wrapper._wait_for_offload_copies()
        wrapper.zero_grad(set_to_none=True)
        wrapper._release_preflattened_grad_buffers()
        self._drop_averages()

    def _drop_averages(self) -> None:
        for index in self._wrapper.averaged_gradients:
            self._wrapper.averaged_gradients[index] = None
            self._wrapper.all_grad_tensors[index] = None


class Stage1And2OnHost(HostOptimizerMixin, Stage1And2):
    """Adapter of `DeepSpeedZeroOptimizer` with the optimizer in host memory."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        super().__init__(engine, *arguments)
        if not self._wrapper.check_grad_overflow:  # it would read a flag of each gradient for it
            self._wrapper.update_offload_overflow_tracker = lambda gradient: None

    def _wait(self) -> None:
        """Wait for the copies from the device; no public method does."""
        self._wrapper._wait_for_offload_copies()

    def _drop_averages(self) -> None:
        self._wrapper._offload_accumulated_param_ids = set()
        self._wrapper.reset_cpu_buffers()


class ZenFlow(Stage1And2OnHost):
    """Adapter of `ZenFlowZeroOptimizer`: matrices lie transposed, and the device updates some
    columns.
    """

    has_readable_gradients = False

    def _find_fragments(self) -> Iterator[Fragment]:
        shapes = {piece.name: piece.shape for piece in self._pieces.values()}
        for fragment in super()._find_fragments():
            yield from split_transposed(fragment, shapes[fragment.name])

    def sync_master_weights(self) -> None:
        self._wrapper.sync_fp32_param_from_gpu()


def gradient_parts(held: Any) -> list[torch.Tensor]:
    """Return the tensors of a partition's gradient, which DeepSpeed holds as a list or flat."""
    flat = getattr(held, "flat_partition", None)
    return list(held) if flat is None else [flat]


class Replicated(Wrapper):
    """Adapter with one tensor per parameter, whose gradient is the same on every replica."""

    are_partitioned = False

    @abstractmethod
    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return each parameter with the fp32 tensor that the optimizer updates."""

    def _masters(self) -> list[torch.Tensor]:
        return [master for _, master in self._pairs()]

    def _find_fragments(self) -> Iterator[Fragment]:
        """Yield one fragment per parameter; parameters are dealt out to the replicas for saving."""
        for index, (parameter, _) in enumerate(self._pairs()):
            piece = self._pieces[parameter]
            replicas = self._mesh.expert_replicas if piece.is_expert else self._mesh.replicas
            dealt = index % replicas.size == replicas.index
            yield Fragment.of_piece(piece, 0, parameter.numel(), index, 0, dealt=dealt)

    def group(self, index: int) -> dict[str, Any]:
        groups = self.optimizer.param_groups
        return [group for group in groups for _ in group["params"]][index]

    @property
    def scale(self) -> float:
        """Loss scale of torch's autocast, else 1: without ZeRO, DeepSpeed itself scales no loss."""
        scaler = self._engine.torch_autocast_z0_gradscaler
        return float(scaler.get_scale()) if scaler else 1.0

    def _gradient(self, index: int) -> list[torch.Tensor]:
        gradients = []
        for fragment in self._by_tensor[index]:
            parameter = self._parameters[fragment.name]
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients

    def copy_masters_to_parameters(self) -> None:
        for fragment in self.fragments:
            values = fragment.of(self.tensors[fragment.tensor].detach().view(-1))
            flat = self._parameters[fragment.name].data.view(-1)
            flat[fragment.start : fragment.start + fragment.numel].copy_(values)


class UnwrappedOptimizer(Replicated):
    """Adapter of a torch optimizer without a wrapper, in fp32; clipping uses the trainer's norm."""

    def _wrapped(self) -> Optimizer:
        return self._wrapper

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [(p, p) for group in self.optimizer.param_groups for p in group["params"]]

    def clip(self, norm: float | None, limit: float | None) -> None:
        assert norm is not None
        gradients = [each.grad for each in self._pieces if each.grad is not None]
        scale_gradients(gradients, clipping_factor(norm, limit))

    def _say_finite(self) -> None:
        """Do nothing: the engine asks a bare optimizer nothing."""


class MasterCopies(Replicated):
    """Adapter of `FP16_UnfusedOptimizer`, which keeps an fp32 copy of each 16-bit parameter."""

    def __init__(self, engine: Any, *arguments: Any) -> None:
        """Remove the states of the update that DeepSpeed makes in order to allocate them.

        That update would count as the first step of Adam's bias correction. (The groups start with
        a learning rate of 0, so the weights have not moved.)
        """
        engine.optimizer.optimizer.state.clear()
        super().__init__(engine, *arguments)

    def _pairs(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        return [
            pair
            for models, masters in zip(
                self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True
            )
            for pair in zip(models, masters, strict=True)
        ]

    def clip(self, norm: float | None, limit: float | None) -> None:
        super().clip(norm, limit)
        if norm is not None and self._wrapper.low_precision_dtype is torch.bfloat16:
            self._wrapper.step = partial(self._step, clipping_factor(norm, limit))

    @torch.no_grad()
    def _step(self, factor: float) -> None:
        """Update as DeepSpeed does, but without its norm and its search for overflows.

        Its own step reads one flag a gradient from the device, and has several kernels a tensor.
        """
        parameters, masters = zip(*self._pairs(), strict=True)
        gradients = [torch.empty_like(master) for master in masters]
        torch._foreach_copy_(gradients, [each.grad for each in parameters])
        scale_gradients(gradients, factor)
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        self.optimizer.step()
        torch._foreach_copy_(parameters, masters)
        for master in masters:
            master.grad = None
        self._say_finite()


class Stage3(Wrapper):
    """Adapter of `DeepSpeedZeroOptimizer_Stage3` on the device."""

    def _masters(self) -> list[torch.Tensor]:
        return list(self._wrapper.fp32_partitioned_groups_flat)

    def _find_fragments(self) -> Iterator[Fragment]:
        wrapper = self._wrapper
        for group in wrapper.fp16_groups:
            for parameter in group:
                index, offset, _ = wrapper.grad_position[wrapper.get_param_id(parameter)]
                start, end = partition_range(parameter)
                if end > start:
                    piece = self._pieces[parameter]
                    yield Fragment.of_piece(piece, start, end - start, index, offset)

    def group(self, index: int) -> dict[str, Any]:
        return self.optimizer.param_groups[self._wrapper.sub_group_to_group_id[index]]

    def _gradient(self, index: int) -> list[torch.Tensor]:
        return gradient_parts(self._wrapper.averaged_gradients[index])

    def clip(self, norm: float | None, limit: float | None) -> None:
        super().clip(norm, limit)
        if norm is not None:
            wrapper, factor = self._wrapper, clipping_factor(norm, limit)
            wrapper._get_norm_groups = lambda: [norm * wrapper.loss_scale]
            wrapper.unscale_and_clip_grads = lambda index, _: scale_gradients(
                [self.tensors[index].grad], factor / wrapper.loss_scale
            )

    def copy_masters_to_parameters(self) -> None:
        wrapper = self._wrapper
        wrapper.parameter_offload.partition_all_parameters()
        for index in range(len(self.tensors)):
            with self.swapped_in(index):
                # As after an update: copy master weights to the model's weights, or to NVMe.
                wrapper._reassign_or_swap_out_partitioned_parameters(index)
        if wrapper.persistent_parameters:
            wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)
        wrapper.invalidate_secondary_tensor()

    def _clear(self) -> None:
        """Clear the gradients as `step` does when it finds an overflow (zero/stage3.py)."""
        wrapper = self._wrapper
        wrapper._pre_step()
        wrapper.parameter_offload.partition_all_parameters()
        wrapper._overflow_clean_up(wrapper.loss_scale)
        wrapper.inf_or_nan_tracker.zero_()  # the overflow flag of fp16


class Stage3OnHost(HostOptimizerMixin, Stage3):
    """Adapter of `DeepSpeedZeroOptimizer_Stage3` with the optimizer in host memory or on NVMe.

    Some sub-groups may stay on the device, where a second optimizer updates them.
    """

    def __init__(self, engine: Any, *arguments: Any) -> None:
        wrapper = engine.optimizer
        if wrapper.partial_offload != 1.0:
            # DeepSpeed shares the host's groups with the device's optimizer, except the first
            # group, whose learning rate would keep its initial value.
            wrapper.backup_optimizer.param_groups.clear()
            for group in wrapper.optimizer.param_groups:
                wrapper.backup_optimizer.add_param_group(group)
        super().__init__(engine, *arguments)

    def updater(self, index: int) -> Updater:
        """Return the updater of a sub-group's optimizer (zero/stage3.py, `_optimizer_step`)."""
        if self._wrapper.subgroup_to_device[index] == "cpu":
            return super().updater(index)
        return updater_of(self._wrapper.backup_optimizer)

    def is_swapped(self, index: int) -> bool:
        """Return True if a sub-group is on NVMe; DeepSpeed keeps small ones in memory by its own
        rule.
        """
        return bool(self._wrapper._swappable_optimizer_subgroup(index))

    def numel(self, index: int) -> int:
        if self.is_swapped(index):
            return int(self._wrapper.fp16_partitioned_groups_flat_numel[index])
        return super().numel(index)

    @contextmanager
    def swapped_in(self, index: int, *, changes: bool = False) -> Iterator[None]:
        if not self.is_swapped(index):
            yield
            return
        # `step` calls this around each sub-group's update; the swapper itself moves no gradients.
        self._wrapper._optimizer_states_and_gradient_swap_in(index)
        yield
        if changes:
            self._wrapper._optimizer_states_and_gradient_swap_out(index)
        else:
            self._wrapper._release_swap_buffers(index)  # nothing is written

    def norms(self) -> Iterator[tuple[Fragment, torch.Tensor]]:
        yield from super().norms()
        for index in filter(self.is_swapped, self._by_tensor):
            yield from self._noted_norms(index)

    def _change(self, index: int, change: Change) -> None:
        if not self.is_swapped(index):
            super()._change(index, change)
            return
        self._wrapper._optimizer_states_and_gradient_swap_in(index)
        super()._change(index, change)
        # DeepSpeed itself writes a gradient back with this, after `safe_set_full_grad`.
        self._wrapper._writeback_swap_state(index, write_opt_state=False, write_gradients=True)


class SuperOffload(Stage3OnHost):
    """Adapter of `SuperOffloadOptimizer_Stage3`, which updates in another process on the host."""

    has_readable_gradients = False

    def check_readable(self) -> None:
        raise TrainctlError(
            "with offload.super_offload the moments are in a process that gives them to "
            "nobody: no checkpoint can be saved",
            hint="offload.super_offload=false",
        )


def wrapper_adapter(wrapper: Any) -> type[Wrapper]:
    """Return the adapter class for a wrapper, by its class and by where its optimizer is."""
    match wrapper:
        case SuperOffloadOptimizer_Stage3():
            return SuperOffload
        case DeepSpeedZeroOptimizer_Stage3():
            return Stage3OnHost if wrapper.offload_optimizer else Stage3
        case ZenFlowZeroOptimizer():
            return ZenFlow
        case DeepSpeedZeroOptimizer():
            return Stage1And2OnHost if wrapper.cpu_offload else Stage1And2
        case BF16_Optimizer():
            return Bf16OptimizerWrapper
        case FP16_UnfusedOptimizer():
            return MasterCopies
        case Optimizer():
            return UnwrappedOptimizer
        case _:
            raise AssertionError(f"DeepSpeed has a wrapper without an adapter: {type(wrapper)}")
