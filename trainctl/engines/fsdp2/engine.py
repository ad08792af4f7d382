"""Training steps with torch's `fully_shard` around the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from trainctl.engines.fsdp2.settings import Settings
from trainctl.engines.fsdp2.shards import shard
from trainctl.engines.fsdp2.states import Shards
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.protocol import Engine, Job
from trainctl.engines.sums import Sums
from trainctl.plan.batches import Batch


class Fsdp2Engine(Engine):
    """Data parallelism with parameters, gradients and optimizer states in shards.

    Args:
        job: What the engine is built from; its model holds this rank's shards (`ShardMaker`).
    """

    states: Shards

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._settings = Settings.of(job.plan)
        self._has_flash_attention = job.flash_attention
        replicas, device = job.mesh.replicas, job.process.device
        units, parameters = shard(
            job.module, job.blocks, job.pieces, replicas, self._settings, device
        )
        self._module, self._root = job.module, units[-1]
        optimizer = job.optimizer or self._settings.make_optimizer(job.groups)
        self.states = Shards(optimizer, parameters, units, job.pieces, replicas)
        self._norm: float | None = None

    @property
    def module(self) -> nn.Module:
        return self._module

    def set_batch(self, batch: Batch) -> None:
        self._batch = batch

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> Sums:
        """Run forward and backward of each micro-batch.

        torch averages gradients over the replicas, so the loss is scaled by their number to get a
        sum.
        """
        scale = self.mesh.replicas.size / num_labels
        sums = Sums(self._process.device)
        for index, batch in enumerate(batches):
            is_last = index + 1 == len(batches)
            reduces = is_last or self._settings.reduce_every_micro_batch
            self._root.set_requires_gradient_sync(reduces)
            with self.times.part("forward"):
                loss = self._module(*self._arguments(batch))
            with self.times.part("backward"):
                (loss * scale).backward()
                sums.add(loss, self._module)
        self.states.take_gradients()
        return sums

    def set_learning_rate(self, factor: float) -> None:
        for group in self.states.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        assert norm is not None  # gradients can always be looked at
        with self.times.part("optimizer"):
            self.states.update(norm, clip_at)
            self.discard()
        self._norm = norm

    def discard(self) -> None:
        self.states.drop_gradients()

    @property
    def norm_of_update(self) -> float | None:
        return self._norm

    @property
    def was_skipped(self) -> bool:
        """Always False: no loss is scaled, and the trainer judges gradients that are not finite."""
        return False

    def resume_at(self, step: int) -> None:
        """Do nothing: this engine counts no steps."""

    def score(self, batch: MicroBatch) -> tuple[float, ...]:
        loss = float(self._module(*self._arguments(batch)))
        return loss, batch.num_counted, *self.measured().sum(dim=0).tolist()

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        inputs, *_ = self._arguments(batch)
        scores: torch.Tensor = self._module(inputs)
        return scores[0, position]

    def _arguments(
        self, batch: MicroBatch
    ) -> tuple[dict[str, Any], torch.Tensor, dict[str, torch.Tensor]]:
        """Return the arguments of a model call, on this rank's device."""
        device = self._process.device
        inputs = batch.model_inputs(device, flash_attention=self._has_flash_attention)
        return inputs, batch.labels.to(device, non_blocking=True), batch.beside(device)

    def close(self) -> None:
        """Free the gathered parameters; the engine has no threads or files."""
        self.states.copy_masters_to_parameters()
