"""Pipeline parallelism: consecutive blocks on each stage, run by DeepSpeed's pipeline engine.

A stage is transformers' own decoder with the blocks of the stage alone, so positions, masks and
whatever else an architecture does around its blocks stay transformers' business. To DeepSpeed it is
a `PipelineModule` of one layer a stage (arXiv:1806.03377 for the schedule, 1F1B).
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.engines.mesh import Axis, ProcessMesh
from trainctl.engines.micro_batch import MicroBatch, document_lengths
from trainctl.engines.process import Process
from trainctl.engines.shards import Pieces
from trainctl.plan.types import RunPlan
from trainctl.train.engine import Engine
from trainctl.train.families import family_of
from trainctl.train.loss import summed_cross_entropy, summed_losses
from trainctl.train.model import has_flash_attention
from trainctl.train.tensor_parallel import gather_vocabulary


def cut_to_stage(model: PreTrainedModel, blocks: range, axis: Axis) -> None:
    """Leave of a skeleton what a stage has: its blocks, and at the ends the embedding and the head.

    Args:
        model: The whole skeleton.
        blocks: Indices of the stage's blocks.
        axis: The pipeline axis.
    """
    family = family_of(model)
    decoder = getattr(model, family.decoder)
    config = copy.deepcopy(decoder.config)
    config.num_hidden_layers = len(blocks)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[blocks.start : blocks.stop]
    decoder.config = config
    setattr(decoder, family.blocks, getattr(decoder, family.blocks)[blocks.start : blocks.stop])
    if not axis.is_first:
        setattr(decoder, family.embedding, nn.Identity())
        if family.positions is not None:
            setattr(decoder, family.positions, _NoPositions())
    if not axis.is_last:
        setattr(decoder, family.final_norm, nn.Identity())
        setattr(model, family.head, nn.Identity())


class _NoPositions(nn.Module):
    """In place of a position embedding: the first stage has added it."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class _Stage(nn.Module):
    """What a stage computes: from token ids or hidden states to hidden states or, last, logits.

    Where documents are masked the positions travel with the hidden states.
    """

    def __init__(self, model: PreTrainedModel, axis: Axis) -> None:
        super().__init__()
        family = family_of(model)
        self.decoder, self.head = getattr(model, family.decoder), getattr(model, family.head)
        self._axis = axis
        self._has_flash_attention = has_flash_attention(model)

    def forward(self, received: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        states, positions = received if isinstance(received, tuple) else (received, None)
        name = "input_ids" if self._axis.is_first else "inputs_embeds"
        inputs = {name: states, "position_ids": positions, "use_cache": False}
        if positions is not None and self._has_flash_attention:
            inputs |= document_lengths(positions, positions.device)
        hidden = self.head(self.decoder(**inputs).last_hidden_state)
        return hidden if positions is None or self._axis.is_last else (hidden, positions)


class _Stages(PipelineModule):
    """One layer a stage, of which this rank has its own; tied weights as our mesh knows them."""

    def __init__(self, stage: nn.Module, mesh: ProcessMesh, loss: Any, tied: Any) -> None:
        self._tied: tuple[nn.Parameter, dist.ProcessGroup] | None = None
        layers: list[Any] = [nn.Identity() for _ in mesh.pipeline.ranks]
        layers[mesh.pipeline.index] = stage
        topology = PipeModelDataParallelTopology(
            num_pp=mesh.pipeline.size, num_mp=mesh.tensor.size, num_dp=mesh.data.size
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints the partition
            super().__init__(layers, topology=topology, loss_fn=loss, partition_method="uniform")
        self._tied = tied

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        return [] if self._tied is None else [self._tied]


class PipelineEngine(Engine):
    """The same as an `Engine`, for a rank that has one stage of the model."""

    def __init__(
        self,
        plan: RunPlan,
        process: Process,
        mesh: ProcessMesh,
        model: PreTrainedModel,
        pieces: Pieces,
    ) -> None:
        self._pipeline = mesh.pipeline
        self._scale = 1.0
        self._loss = torch.zeros((), dtype=torch.float64, device=process.device)
        self._z = torch.zeros_like(self._loss)
        super().__init__(plan, process, mesh, model, pieces)
        instructions = self.deepspeed._INSTRUCTION_MAP
        self.deepspeed._INSTRUCTION_MAP = {
            **instructions,
            schedule.ForwardPass: self._timed("forward", instructions[schedule.ForwardPass]),
            schedule.BackwardPass: self._timed("backward", instructions[schedule.BackwardPass]),
            # The update comes later, when all ranks have seen that the loss is finite.
            schedule.OptimizerStep: lambda engine: None,
        }

    def _timed(self, part: str, instruction: Callable[..., None]) -> Callable[..., None]:
        """The instruction as a part of the step's time; an evaluation's is timed as a whole."""

        def execute(engine: Any, *arguments: Any, **options: Any) -> None:
            is_training = engine.module.training
            with self.times.part(part) if is_training else contextlib.nullcontext():
                instruction(engine, *arguments, **options)

        return execute

    def _module(self, model: PreTrainedModel) -> nn.Module:
        tied = self._tied_weight(model)
        stages = _Stages(_Stage(model, self._pipeline), self.mesh, self._loss_of, tied)
        if tied is not None and self._pipeline.is_last:
            tied[0].ds_pipe_replicated = True  # the first stage counts it in the gradient's norm
        return stages

    def _tied_weight(self, model: PreTrainedModel) -> tuple[nn.Parameter, dist.ProcessGroup] | None:
        """The weight of embedding and output projection, with the group of their two stages."""
        if not self._plan.config.model.tie_word_embeddings:
            return None
        first, *between, last = self._pipeline.ranks
        is_end = self._pipeline.is_first or self._pipeline.is_last
        # NCCL splits groups off that of all ranks, and waits for all: those between make one too.
        members = [first, last] if is_end else between
        timeout = self._process.timeout
        group = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
        if not is_end:
            return None
        family = family_of(model)
        if self._pipeline.is_first:
            return getattr(getattr(model, family.decoder), family.embedding).weight, group
        return getattr(model, family.head).weight, group

    def _loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        weight = self._plan.config.stability.z_loss
        if weight == 0:
            loss = summed_cross_entropy(logits, labels, self._vocabulary)
            self._loss += loss.detach()
            return loss * self._scale
        losses = summed_losses(logits, labels, self._vocabulary, z_loss=weight)
        self._loss += losses[0].detach()
        self._z += losses[1].detach()
        return losses.sum() * self._scale

    def accumulate(self, batches: Sequence[MicroBatch]) -> tuple[float, float]:
        num_labels = self._num_labels(batches)
        # DeepSpeed divides the loss by the number of micro-batches.
        self._scale = self.mesh.replicas.size * len(batches) / max(1.0, num_labels)
        self._loss.zero_()
        self._z.zero_()
        self.deepspeed.train_batch(iter([self._pair(batch) for batch in batches]))
        return self._mean_loss(self._loss, self._z, num_labels), num_labels

    def update(self, *, norm: float | None, clip_at: float | None) -> None:
        assert norm is not None  # nothing that hides gradients goes with stages (TC069)
        wrapper = self.deepspeed.optimizer
        # DeepSpeed takes the norm of one parameter group after the other over the stages, and would
        # wait for ever where one stage has more of them (zero/stage_1_and_2.py).
        wrapper.scaled_global_norm = lambda: torch.tensor(norm * wrapper.loss_scale)
        super().update(norm=norm, clip_at=clip_at)

    def _step(self) -> None:
        self.deepspeed._exec_optimizer_step()

    def score(self, batch: MicroBatch) -> tuple[float, int]:
        logits = self._forward(batch)
        if logits is None:
            return 0.0, 0
        # The ranks of a tensor group compute it together, and one of them counts.
        loss = summed_cross_entropy(logits, self._on_device(batch.labels), self._vocabulary)
        return (float(loss), batch.num_labels) if self.mesh.tensor.is_first else (0.0, 0)

    def _last_scores(self, batch: MicroBatch, position: int) -> torch.Tensor | None:
        logits = self._forward(batch)
        if logits is None:
            return None
        if self._vocabulary is not None:
            logits = gather_vocabulary(logits, self._vocabulary)
        return logits[0, position]

    def _forward(self, batch: MicroBatch) -> torch.Tensor | None:
        """The logits on the last stage, None on the others."""
        self.deepspeed.reset_activation_shape()  # of the training's batches
        self.deepspeed.total_loss = None  # it adds up whatever the last stage puts out
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
