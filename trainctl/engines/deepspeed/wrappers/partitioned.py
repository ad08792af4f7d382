"""ZeRO 1 and 2: one flat tensor for each parameter group, partitioned over the replicas."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trainctl.engines.deepspeed.wrappers.base import OnHost, Wrapper
from trainctl.engines.fragments import ElementRange, Fragment, split_transposed
from trainctl.engines.protocol import Change


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
        groups: list[list[nn.Parameter]] = self._wrapper.bf16_groups
        return groups

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
        groups: list[list[nn.Parameter]] = self._wrapper.bit16_groups
        return groups

    def _gradient(self, index: int) -> list[torch.Tensor]:
        return gradient_parts(self._wrapper.averaged_gradients[index])

    def use_norm(self, norm: float) -> None:
        wrapper = self._wrapper
        # DeepSpeed's own norm reduces group by group, and hangs if stages have different groups.
        wrapper.scaled_global_norm = lambda: torch.tensor(norm * wrapper.loss_scale)

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


class Stage1And2OnHost(OnHost, Stage1And2):
    """Adapter of `DeepSpeedZeroOptimizer` with the optimizer in host memory."""

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
