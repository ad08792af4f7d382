"""Training steps with torch's `fully_shard` around the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from trainctl.engines.fragments import ElementRange, Fragment
from trainctl.engines.fsdp2.shards import Settings, Sharded, shard_model, shard_start
from trainctl.engines.micro_batch import MicroBatch, Sums
from trainctl.engines.process import Axis
from trainctl.engines.protocol import CLIPPING_EPSILON, Change, Engine, Job, States
from trainctl.engines.shards import Pieces


class Shards(States):
    """States whose tensors are each a range of one parameter, with the same range of its gradient.

    Args:
        optimizer: Optimizer of the shards.
        parameters: All parameters that the model trains.
        units: Modules that gather the parameters.
        pieces: The piece of each shard.
        replicas: The ranks over which parameters are sharded.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Sequence[Sharded],
        units: Sequence[FSDPModule],
        pieces: Pieces,
        replicas: Axis,
    ) -> None:
        self.optimizer = optimizer
        self._units, self._parameters = units, parameters
        groups = {p: group for group in optimizer.param_groups for p in group["params"]}
        self.tensors = [each.shard for each in parameters]
        self._groups = [groups[tensor] for tensor in self.tensors]
        self.fragments = [
            Fragment.of_piece(
                pieces[shard], shard_start(pieces[shard].shape, replicas), shard.numel(), index, 0
            )
            for index, shard in enumerate(self.tensors)
            if shard.numel()
        ]

    def group(self, index: int) -> dict[str, Any]:
        return self._groups[index]

    def copy_masters_to_parameters(self) -> None:
        """Free the gathered parameters, which hold the old values, so that torch gathers them
        again.
        """
        for unit in self._units:
            unit.reshard()

    def gradients(self) -> Iterator[tuple[Fragment, int, torch.Tensor]]:
        for fragment in self.fragments:
            gradient = self.tensors[fragment.tensor].grad
            assert gradient is not None
            yield fragment, fragment.start, gradient.view(-1)

    def change(self, change: Change) -> None:
        for fragment, start, gradient in self.gradients():
            change(ElementRange(fragment.name, None, start, fragment.numel), gradient)

    def take_gradients(self) -> None:
        """Give the shards the gradients of the step's backward passes."""
        for each in self._parameters:
            each.take_gradient()

    @torch.no_grad()
    def update(self, norm: float, limit: float | None) -> None:
        """Clip the gradients and step.

        Args:
            limit: Clipping threshold; None does not clip.
        """
        if limit is not None and limit < norm + CLIPPING_EPSILON:
            for _, _, gradient in self.gradients():
                gradient.mul_(limit / (norm + CLIPPING_EPSILON))
        self.optimizer.step()

    def drop_gradients(self) -> None:
        """Clear the gradients."""
        for each in self._parameters:
            each.drop_gradient()


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
        units, parameters = shard_model(
            job.module, job.blocks, job.pieces, replicas, self._settings, device
        )
        self._module, self._root = job.module, units[-1]
        optimizer = job.optimizer or self._settings.make_optimizer(job.groups)
        self.states = Shards(optimizer, parameters, units, job.pieces, replicas)
        self._norm: float | None = None

    @property
    def module(self) -> nn.Module:
        return self._module

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

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        assert norm is not None  # gradients are always accessible
        with self.times.part("optimizer"):
            self.states.update(norm, clip_at)
            self.discard()
        self._norm = norm

    def discard(self) -> None:
        self.states.drop_gradients()

    @property
    def norm_of_update(self) -> float | None:
        return self._norm

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
        return inputs, batch.labels.to(device, non_blocking=True), batch.objective_inputs(device)

    def close(self) -> None:
        """Free the gathered parameters; the engine has no threads or files."""
        self.states.copy_masters_to_parameters()
