"""ZeRO 3: each parameter is partitioned by itself, and the optimizer's tensors are sub-groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainctl.engines.deepspeed.partition import partition_range
from trainctl.engines.deepspeed.wrappers.base import OnHost, Wrapper, updater_of
from trainctl.engines.deepspeed.wrappers.partitioned import gradient_parts
from trainctl.engines.fragments import Fragment
from trainctl.engines.protocol import Change, Updater
from trainctl.errors import TrainctlError


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


class Stage3OnHost(OnHost, Stage3):
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

    def _squares(self, index: int) -> Iterator[tuple[Fragment, torch.Tensor]]:
        return self._noted_squares(index) if self.is_swapped(index) else super()._squares(index)

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
