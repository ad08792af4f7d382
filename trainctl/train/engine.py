"""DeepSpeed's engine around the model, and the few things that the trainer asks of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import CompileKind, RunConfig
from trainctl.engines.deepspeed.sequence_parallel import SequenceParallelAttention
from trainctl.engines.deepspeed.swap import remove_swap_folder
from trainctl.engines.mesh import ProcessMesh
from trainctl.engines.micro_batch import IGNORED_LABEL, MicroBatch
from trainctl.engines.process import Process
from trainctl.engines.shards import Piece, Pieces
from trainctl.engines.stopwatch import Stopwatch
from trainctl.plan.batches import Batch
from trainctl.plan.groups import GroupKey, group_of, in_order
from trainctl.plan.precision import formats
from trainctl.plan.types import RunPlan
from trainctl.train.clipping import CLIPPING_EPSILON
from trainctl.train.gradient_changes import centralize
from trainctl.train.loss import LanguageModel
from trainctl.train.model import has_flash_attention
from trainctl.train.optimizers import own_optimizer
from trainctl.train.precision import LossScale, share_groups, stop_at_smallest
from trainctl.train.tensor_parallel import sum_partial_gradients


class Engine:
    """A model that trains: forward, backward, update.

    Args:
        plan: The plan of the run.
        process: This rank.
        mesh: Its place on the mesh.
        model: With its weights, whole, sharded or partitioned as the plan wants.
        pieces: Of its parameters.

    Attributes:
        times: Where the time of a step goes.
        loss_scale: Of fp16 weights; None for other formats.
        z_loss: Of the last step, beside its loss and in its units; None without one.
        summed_loss: Of the last step, over this rank's own labels, in nats.
    """

    def __init__(
        self,
        plan: RunPlan,
        process: Process,
        mesh: ProcessMesh,
        model: PreTrainedModel,
        pieces: Pieces,
    ) -> None:
        self._plan = plan
        self._batch = plan.batch
        self._process = process
        self.mesh = mesh
        self.pieces = pieces
        self.times = Stopwatch(process.device)
        self.z_loss: float | None = None
        self.summed_loss = 0.0
        self._vocabulary = mesh.tensor if mesh.tensor.size > 1 else None
        self._has_flash_attention = has_flash_attention(model)
        self._attention = SequenceParallelAttention(plan, mesh) if mesh.sequence.size > 1 else None
        sum_partial_gradients(pieces, mesh.tensor)
        if plan.config.gradients.centralize:
            centralize(model, pieces, self._vocabulary)
        module = self._module(model)
        groups = parameter_groups(pieces, plan.config, lr_scale=plan.lr_scale)
        own = own_optimizer(plan, groups)
        self.deepspeed, *_ = deepspeed.initialize(
            model=module,
            optimizer=own,
            model_parameters=groups if own is None else None,
            config=plan.deepspeed,
            mpu=mesh.model_parallel_unit if mesh.pipeline.size == 1 else None,
            dist_init_required=False,
        )
        if plan.config.kernels.compile is CompileKind.deepcompile:
            self.deepspeed.compile()
        self._forget_initial_step()
        share_groups(self.deepspeed.optimizer)
        weights = formats(plan.config.precision).weights
        self.loss_scale = LossScale.of(self.deepspeed.optimizer, weights)

    def _module(self, model: PreTrainedModel) -> nn.Module:
        """What DeepSpeed trains."""
        z_loss = self._plan.config.stability.z_loss
        return LanguageModel(model, self._vocabulary, self._plan.config.kernels, z_loss)

    def _forget_initial_step(self) -> None:
        """Undo the update that DeepSpeed makes to allocate states, without ZeRO in low precision.

        Left alone it would count as the first step of Adam's bias correction. (The groups start
        with a learning rate of 0, so the weights have not moved.)
        """
        if self.stage == 0 and not self._is_plain:
            self.deepspeed.optimizer.optimizer.state.clear()

    @property
    def config(self) -> RunConfig:
        return self._plan.config

    @property
    def stage(self) -> int:
        return self._plan.config.zero_stage.stage

    @property
    def has_zenflow(self) -> bool:
        """Whether the optimizer is ZenFlow's, whose tensors hold matrices transposed."""
        return self._plan.config.offload.zenflow

    def set_batch(self, batch: Batch) -> None:
        """Give the steps from now on a batch of another size: other accumulation steps.

        The engine is built for the largest: DeepSpeed allocates by whether it accumulates at all.
        """
        if batch == self._batch:
            return
        self._batch, engine = batch, self.deepspeed
        each = engine.train_micro_batch_size_per_gpu() * engine.dp_world_size  # as it counts
        engine.set_train_batch_size(batch.gradient_accumulation_steps * each)
        # It takes a step's end for a multiple of the accumulation steps, over the whole run.
        engine.micro_steps = 0

    def learning_rates(self) -> dict[str, float]:
        """Of the last update, as the optimizer that made it has them: by parameter group."""
        wrapper = self.deepspeed.optimizer
        groups = getattr(wrapper, "optimizer", wrapper).param_groups
        return {group.get("name", str(i)): float(group["lr"]) for i, group in enumerate(groups)}

    def accumulate(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        """Forward and backward over a step's micro-batches, leaving the mean gradient.

        Every label of the global batch has the same weight, on whichever rank and in whichever
        micro-batch it is: DeepSpeed averages gradients over the replicas (the data- and
        sequence-parallel ranks), so each sum is scaled by their number over the count of labels.

        Returns:
            The mean loss in nats over the global batch's labels, and their number.
        """
        num_labels = self._num_labels(batches)
        scale = self.mesh.replicas.size / max(1.0, num_labels)
        # On the device, and read once: reading it makes the host wait for what it has started.
        total = torch.zeros((), dtype=torch.float64, device=self._process.device)
        z_total = torch.zeros_like(total)
        for index, batch in enumerate(batches):
            with self.times.part("forward"):
                inputs, labels = self._inputs(batch)
                loss = self.deepspeed(inputs, labels)
            with self.times.part("backward"):
                self.deepspeed.backward(loss * scale, scale_wrt_gas=False)
                total += loss.detach()
                z_loss = self.deepspeed.module.last_z_loss
                if z_loss is not None:
                    total -= z_loss
                    z_total += z_loss
                if index + 1 < len(batches):
                    self.deepspeed.step()  # not at the boundary: only counts the micro-step
        return self._mean_loss(total, z_total, num_labels), num_labels

    def advance(self) -> None:
        """Let DeepSpeed count a step as `update` does; for whoever has replaced what it makes."""
        self._step()

    def set_learning_rate(self, factor: float) -> None:
        """For the next step, before its gradients: a factor of each group's peak learning rate."""
        for group in self.deepspeed.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        """Clip, step the optimizer, clear the gradients.

        Args:
            norm: Of the gradient as it is now; None where only DeepSpeed can tell.
            clip_at: What it is clipped at; None does not clip.

        Raises:
            TrainctlError: fp16 gradients overflow at the smallest loss scale; on all ranks.
        """
        with self.times.part("optimizer"):
            if self._is_plain:
                # Without ZeRO and in fp32 DeepSpeed hands the update to torch and keeps no norm.
                assert norm is not None
                self._clip(norm, clip_at)
            else:
                self.deepspeed.optimizer.clip_grad = clip_at or 0.0
            with stop_at_smallest(self.loss_scale):
                self._step()

    @property
    def norm_of_update(self) -> float | None:
        """What DeepSpeed took the gradient norm of the last update for, before clipping; None where
        it made none at the last step."""
        return float(self.deepspeed.get_global_grad_norm())

    @property
    def was_skipped(self) -> bool:
        """Whether the last update was not made, because the gradients were not finite."""
        return not self.deepspeed.was_step_applied()

    def resume_at(self, step: int) -> None:
        """Go on after `step` steps, the optimizer's state being that of a checkpoint."""

    def score(self, batch: MicroBatch) -> tuple[float, int]:
        """The summed loss over a batch's labels and their number, of those that this rank counts.

        Summed over all ranks they are those of the data-parallel ranks' batches.
        """
        inputs, labels = self._inputs(batch)
        loss = float(self.deepspeed(inputs, labels))
        number = int((labels != IGNORED_LABEL).sum())
        return (loss, number) if self.mesh.tensor.is_first else (0.0, 0)

    def next_scores(self, ids: list[int]) -> torch.Tensor:
        """Scores of the token after `ids`, (vocabulary,) in fp32 on the CPU: the same on all ranks.

        Args:
            ids: Token ids, the same on all ranks; at least one.
        """
        # Every rank of a sequence or tensor group has an equal part of the context.
        multiple = self.mesh.sequence.size * self.mesh.tensor.size
        padded = ids + [0] * (-len(ids) % multiple)
        batch = MicroBatch.of_context(padded, samples=self._plan.batch.micro_batch_size)
        scores = self._last_scores(batch, len(ids) - 1)
        is_mine = scores is not None and self.mesh.tensor.is_first and self.mesh.data.is_first
        size = self._plan.config.model.vocab_size
        mine = scores.double().cpu().tolist() if is_mine and scores is not None else [0.0] * size
        return torch.tensor(self._process.sum(*mine), dtype=torch.float32)

    def close(self) -> None:
        """Release DeepSpeed's threads and buffers; must come before the process groups go."""
        self.deepspeed.destroy()
        if self._attention is not None:
            self._attention.close()
        remove_swap_folder(self._plan)

    def _last_scores(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        """The first sample's scores at a position of the whole sequence, if this rank has it."""
        inputs, labels = self._inputs(batch)
        scores = self.deepspeed(inputs)
        position -= self.mesh.sequence.index * labels.shape[1]
        return scores[0, position] if 0 <= position < labels.shape[1] else None

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        """The model's inputs and the labels of this rank's part of the batch, on its device."""
        part = self.mesh.sequence.index, self.mesh.sequence.size
        inputs = batch.model_inputs(
            self._process.device, part=part, flash_attention=self._has_flash_attention
        )
        return inputs, self._on_device(batch.part(*part).labels)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._process.device, non_blocking=True)

    def _num_labels(self, batches: Sequence[MicroBatch]) -> float:
        """Labels in the global batch."""
        if not batches[0].is_masked:  # every position has one: no rank needs to ask
            return float(self._batch.tokens_per_step)
        (number,) = self._process.sum(sum(batch.num_labels for batch in batches))
        return number * self.mesh.data.size / self._process.world_size

    def _mean_loss(self, total: torch.Tensor, z_total: torch.Tensor, num_labels: float) -> float:
        """From this rank's summed losses; the ranks of a tensor group all have the same."""
        own, z_own = torch.stack([total, z_total]).tolist()
        self.summed_loss = own
        loss, z_loss = self._process.sum(*((own, z_own) if self.mesh.tensor.is_first else (0, 0)))
        if self._plan.config.stability.z_loss > 0:
            self.z_loss = z_loss / max(1.0, num_labels)
        return loss / max(1.0, num_labels)

    def _step(self) -> None:
        self.deepspeed.step()

    @property
    def _is_plain(self) -> bool:
        return isinstance(self.deepspeed.optimizer, torch.optim.Optimizer)

    def _clip(self, norm: float, limit: float | None) -> None:
        """Scale the gradients: the JSON leaves it to us where there is no ZeRO, in fp32."""
        if limit is not None and limit < norm + CLIPPING_EPSILON:
            for parameter in self.pieces:
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + CLIPPING_EPSILON))


def group_key(piece: Piece, config: RunConfig) -> GroupKey:
    """The group of a parameter, by the plan's rule."""
    embedding, head = piece.is_embedding, piece.is_head
    return group_of(config, piece.name, piece.shape, embedding=embedding, head=head)


def parameter_groups(
    pieces: Pieces, config: RunConfig, *, lr_scale: float = 1.0
) -> list[dict[str, Any]]:
    """The optimizer's groups of what a rank has, by the plan's rule; empty ones are left out."""
    members: dict[GroupKey, list[nn.Parameter]] = {}
    for parameter, piece in pieces.items():
        members.setdefault(group_key(piece, config), []).append(parameter)
    return [
        {
            "params": members[key],
            "name": key.name(config),
            "uses_muon": key.uses_muon,
            "weight_decay": key.weight_decay,
            "lr": 0.0,
            "peak_lr": key.peak_lr(config) * lr_scale,
        }
        for key in in_order(members)
    ]
