"""Training steps with DeepSpeed's engine around the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import nn

from trainctl.config.schema import CompileKind
from trainctl.engines.deepspeed.experts import register_experts
from trainctl.engines.deepspeed.loss_scale import DeepSpeedLossScale, stop_at_smallest
from trainctl.engines.deepspeed.model_parallel_unit import unit_of
from trainctl.engines.deepspeed.sequence_parallel import SequenceParallelAttention
from trainctl.engines.deepspeed.swap import remove_swap_folder
from trainctl.engines.deepspeed.wrappers import adapter_of
from trainctl.engines.deepspeed.wrappers.base import Wrapper
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.protocol import Engine, Job
from trainctl.engines.sums import Sums
from trainctl.plan.batches import Batch
from trainctl.plan.precision import formats


class DeepSpeedEngine(Engine):
    """Data, tensor and sequence parallelism, at any ZeRO stage.

    Attributes:
        deepspeed: DeepSpeed's own engine.
    """

    states: Wrapper
    loss_scale: DeepSpeedLossScale | None

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        plan, mesh = job.plan, job.mesh
        self._has_flash_attention = job.flash_attention
        self._attention = SequenceParallelAttention(plan, mesh) if mesh.sequence.size > 1 else None
        for parameter, piece in job.pieces.items():
            # DeepSpeed's norm counts a parameter that is not split on one tensor rank only.
            parameter.model_parallel = not (piece.shard.is_whole or piece.is_expert)
        module = self._wrap(job)
        if mesh.expert.size > 1:
            register_experts(module, job)
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=job.optimizer,
            model_parameters=job.groups if job.optimizer is None else None,
            config=plan.deepspeed,
            mpu=unit_of(mesh) if mesh.pipeline.size == 1 else None,
            dist_init_required=False,
        )
        is_compiled = plan.config.kernels.compile is CompileKind.deepcompile
        if is_compiled:
            self.deepspeed.compile()
        wrapper = self.deepspeed.optimizer
        self.states = adapter_of(wrapper)(self.deepspeed, job.pieces, mesh)
        self.states.has_readable_gradients &= not is_compiled
        weights = formats(plan.config.precision).weights
        self.loss_scale = DeepSpeedLossScale.of(wrapper, weights)

    def _wrap(self, job: Job) -> nn.Module:
        """Return the module to give to DeepSpeed."""
        return job.module

    @property
    def module(self) -> nn.Module:
        return self.deepspeed

    def set_batch(self, batch: Batch) -> None:
        """Change the batch of the following steps.

        The engine is built for the largest batch, because DeepSpeed's allocations depend on whether
        it accumulates gradients.
        """
        if batch == self._batch:
            return
        self._batch, engine = batch, self.deepspeed
        each = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size  # DeepSpeed's count
        engine.set_train_batch_size(batch.gradient_accumulation_steps * each)
        # DeepSpeed ends a step at each multiple of the accumulation steps since the start.
        engine.micro_steps = 0

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> Sums:
        """Run forward and backward of each micro-batch.

        DeepSpeed averages gradients over the replicas, so the loss is scaled by their number to get
        a sum.
        """
        scale = self.mesh.replicas.size / num_labels
        sums = Sums(self._process.device)
        for index, batch in enumerate(batches):
            with self.times.part("forward"):
                loss = self.deepspeed(*self._arguments(batch))
            with self.times.part("backward"):
                self.deepspeed.backward(loss * scale, scale_wrt_gas=False)
                sums.add(loss, self.deepspeed.module)
                if index + 1 < len(batches):
                    self.deepspeed.step()  # before the boundary it only counts the micro-step
        return sums

    def set_learning_rate(self, factor: float) -> None:
        for group in self.states.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        with self.times.part("optimizer"):
            if norm is not None and self.mesh.expert.size > 1:
                self.states.use_norm(norm)
            self.states.clip(norm, clip_at)
            with stop_at_smallest(self.loss_scale):
                self._step()

    def discard(self) -> None:
        """Let DeepSpeed count the step and clear the gradients, without an update."""
        with self.states.without_update():
            self._step()

    def _step(self) -> None:
        self.deepspeed.step()

    @property
    def norm_of_update(self) -> float | None:
        return float(self.deepspeed.get_global_grad_norm())

    @property
    def was_skipped(self) -> bool:
        return not self.deepspeed.was_step_applied()

    def resume_at(self, step: int) -> None:
        """Do nothing: no decision depends on DeepSpeed's own count of steps."""

    def score(self, batch: MicroBatch) -> tuple[float, ...]:
        loss = float(self.deepspeed(*self._arguments(batch)))
        found = loss, batch.part(*self._part).num_counted, *self.measured().sum(dim=0).tolist()
        return found if self.mesh.tensor.is_first else (0.0,) * len(found)

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        inputs, labels, _ = self._arguments(batch)
        scores = self.deepspeed(inputs)
        position -= self.mesh.sequence.index * labels.shape[1]
        return scores[0, position] if 0 <= position < labels.shape[1] else None

    @property
    def _part(self) -> tuple[int, int]:
        """Index of this rank's part of every sequence, and the number of parts."""
        return self.mesh.sequence.index, self.mesh.sequence.size

    def _arguments(
        self, batch: MicroBatch
    ) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
        """Return the arguments of a model call for this rank's part of the batch, on its device."""
        device = self._process.device
        inputs = batch.model_inputs(
            device, part=self._part, flash_attention=self._has_flash_attention
        )
        return inputs, self._on_device(batch.part(*self._part).labels), batch.beside(device)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._process.device, non_blocking=True)

    def close(self) -> None:
        self.deepspeed.destroy()
        if self._attention is not None:
            self._attention.close()
        remove_swap_folder(self._plan)
