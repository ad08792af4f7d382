"""Training steps with DeepSpeed's pipeline engine, which sees one layer per stage.

The schedule is 1F1B (arXiv:1806.03377), or DualPipeV (arXiv:2412.19437) with two layers per rank.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn

from trainctl.engines.deepspeed.engine import DeepSpeedEngine
from trainctl.engines.micro_batch import MicroBatch, StepSums
from trainctl.engines.process import Axis, ProcessMesh
from trainctl.engines.protocol import Job
from trainctl.plans.types import Batch, RunPlan


class _Stages(PipelineModule):
    """Pipeline module with one layer per stage and the mesh's group for tied weights.

    Layers of other stages are placeholders on this rank.
    """

    def __init__(self, plan: RunPlan, stages: Any, mesh: ProcessMesh, loss: Any, tied: Any) -> None:
        self._tied: tuple[nn.Parameter, dist.ProcessGroup] | None = None
        layers: list[Any] = [nn.Identity() for _ in plan.stages]
        for number, stage in zip(plan.stages_of(mesh.pipeline.index), stages, strict=True):
            layers[number] = stage
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size
        )
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints the partition
            super().__init__(layers, topology=topology, loss_fn=loss, partition_method="uniform")
        self._tied = tied

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        return [] if self._tied is None else [self._tied]


class _FoldedStages(_Stages, DualPipeVModule):
    """Pipeline module with two layers per rank."""


class _FoldedForward(schedule.PipeSchedule):
    """Forward pass of one micro-batch through both stages of every rank.

    DeepSpeed's own schedule takes no fewer than two micro-batches per rank.
    """

    def num_pipe_buffers(self) -> int:
        return 2 * int(self.micro_batches)  # the engine finds labels by the micro-batches of a step

    def steps(self) -> Iterator[list[Any]]:
        ends = (0, self.stages - 1)
        for phase, (start, end) in enumerate((ends, ends[::-1])):
            where = {"buffer_id": phase * self.micro_batches}
            if self.stage_id != start:
                yield [schedule.RecvActivation(**where, phase=phase), schedule.CommitP2P()]
            elif phase == 0:
                yield [schedule.LoadMicroBatch(**where)]
            yield [schedule.ForwardPass(**where, phase=phase)]
            if self.stage_id != end:
                yield [schedule.SendActivation(**where, phase=phase), schedule.CommitP2P()]


class PipelineEngine(DeepSpeedEngine):
    """A `DeepSpeedEngine` for a rank that holds one or two pipeline stages of the model."""

    def __init__(self, job: Job) -> None:
        self._pipeline = job.mesh.pipeline
        stages: Any = job.module
        self._stage = stages[-1]
        self._scale = 1.0
        self._sums = StepSums(job.process.device)
        super().__init__(job)
        # Functions of a schedule's instructions; DeepSpeed accepts no other schedule.
        instructions = self.deepspeed._INSTRUCTION_MAP
        self.deepspeed._INSTRUCTION_MAP = {
            **instructions,
            schedule.ForwardPass: self._timed("forward", instructions[schedule.ForwardPass]),
            schedule.BackwardPass: self._timed("backward", instructions[schedule.BackwardPass]),
            # The update comes later, when all ranks have seen that the loss is finite.
            schedule.OptimizerStep: lambda engine: None,
        }
        if self._pipeline.is_folded:
            self.deepspeed._inference_schedule = lambda _: _FoldedForward(
                self.deepspeed.micro_batches, self._pipeline.size, self._pipeline.index
            )

    @property
    def stage(self) -> int:
        phase = self.deepspeed.module.active_phase if self._pipeline.is_folded else 0
        return self._plan.stages_of(self._pipeline.index)[phase]

    def _timed(self, part: str, instruction: Callable[..., None]) -> Callable[..., None]:
        """Return the instruction, timed as a part of the step while training; an evaluation is
        timed whole.
        """

        def execute(engine: Any, *arguments: Any, **options: Any) -> None:
            is_training = engine.module.training
            with self.times.part(part) if is_training else contextlib.nullcontext():
                instruction(engine, *arguments, **options)

        return execute

    def _wrap(self, job: Job) -> nn.Module:
        tied, is_folded = None, self._pipeline.is_folded
        if job.plan.config.model.tie_word_embeddings and not is_folded:
            group = tied_weight_group(self._pipeline, job.process.timeout)
            # DeepSpeed would look for the fp32 gradient of a frozen weight (pipe/engine.py).
            is_trained = job.tied is not None and job.tied.requires_grad
            tied = (job.tied, group) if group is not None and is_trained else None
        if job.tied is not None and self._pipeline.is_last:
            job.tied.ds_pipe_replicated = True  # the first stage counts it in the gradient's norm
        kind = _FoldedStages if is_folded else _Stages
        return kind(job.plan, job.module, job.mesh, self._loss_of, tied)

    def _loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses = self._stage.losses(logits, labels)
        if losses.dim() == 0:
            self._sums.loss += losses.detach()
            return losses * self._scale
        self._sums.loss += losses[0].detach()
        self._sums.z_loss += losses[1].detach()
        return losses.sum() * self._scale

    def set_batch(self, batch: Batch) -> None:
        if batch != self._batch:
            self.deepspeed.reset_activation_shape()  # shape of the previous micro-batches
        super().set_batch(batch)

    def run(self, batches: Sequence[MicroBatch], num_labels: float) -> StepSums:
        # DeepSpeed divides the loss by the number of micro-batches.
        self._scale = self.mesh.replicas.size * len(batches) / num_labels
        self._sums = StepSums(self._process.device)
        self.deepspeed.train_batch(iter([self._pair(batch) for batch in batches]))
        return self._sums

    def _step(self) -> None:
        # The instruction left out of the schedule; the engine's own `step` refuses stages.
        self.deepspeed._exec_optimizer_step()

    def output(self, batch: MicroBatch) -> torch.Tensor:
        logits = self._forward(batch)
        if logits is None:
            return torch.zeros(())
        return self._stage.losses(logits, self._on_device(batch.labels))

    def _score(self, batch: MicroBatch) -> tuple[float, ...]:
        loss = float(self.output(batch))
        return loss, batch.num_labels if self._pipeline.is_last else 0

    def scores_at(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        logits = self._forward(batch)
        return None if logits is None else self._stage.full_vocab_logits(logits)[0, position]

    def _forward(self, batch: MicroBatch) -> torch.Tensor | None:
        """Return the logits on the last stage, None on the other stages."""
        self.deepspeed.reset_activation_shape()  # shape of the training batches
        self.deepspeed.total_loss = None  # DeepSpeed adds the last stage's output to this
        _, logits = self.deepspeed.eval_batch(
            iter([self._pair(batch)]),
            return_logits=True,
            compute_loss=False,
            reduce_output=None,
            num_micro_batches=1,
        )
        self.deepspeed.reset_activation_shape()
        return logits if self._pipeline.is_last else None

    @staticmethod
    def _pair(batch: MicroBatch) -> tuple[Any, torch.Tensor]:
        ids = batch.input_ids
        return (ids, batch.position_ids) if batch.is_masked else ids, batch.labels


def tied_weight_group(pipeline: Axis, timeout: timedelta) -> dist.ProcessGroup | None:
    """Return the process group of the first and the last stage; None on the stages between.

    All stages call it together.
    """
    first, *between, last = pipeline.ranks
    is_end = pipeline.is_first or pipeline.is_last
    # NCCL splits groups off the group of all ranks, and waits for all ranks: so the stages between
    # make a group too.
    members = [first, last] if is_end else between
    group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return group if is_end else None
