"""Assembly of a rank: model, engine, data and, on resume, the state of the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.registry import function_of
from trainctl.data.corpora import Corpora, changed_sources, load_corpora
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.engines.process import Process, ProcessMesh, join_mesh
from trainctl.engines.protocol import Engine, Job, engine_backend
from trainctl.engines.shards import Pieces
from trainctl.errors import RunStateError
from trainctl.models.hf_weights import Buffer, persistent_buffers, remaining_buffers
from trainctl.options.adapter import low_rank
from trainctl.options.precision import precision_of
from trainctl.plans.identity import check_trainable, model_description
from trainctl.plans.mixture import SINGLE_SOURCE
from trainctl.plans.mup import multipliers
from trainctl.plans.settings import number_formats, reads_document_bounds
from trainctl.plans.trainable import is_partial
from trainctl.plans.types import RunPlan
from trainctl.runs.checkpoints import manifest_run_id
from trainctl.runs.layout import RunPaths
from trainctl.train.adapters.layers import apply_adapter, initial_adapter
from trainctl.train.adapters.quantized import dequantized_source, quantize, quantized_source
from trainctl.train.checkpoint.content import CheckpointReader, RunProgress, newest_valid_checkpoint
from trainctl.train.checkpoint.optimizer_state import OptimizerState, WeightAverage
from trainctl.train.data import PackedDataset, TrainingData, held_out_data
from trainctl.train.gradients import Gradients, NormHistory, centralize
from trainctl.train.learning_rate import LearningRate
from trainctl.train.models.frozen_base import (
    FullModel,
    OverlayWeights,
    initial_base,
    manifest_entries,
    recorded_base,
)
from trainctl.train.models.kernels import apply_kernels
from trainctl.train.models.model import (
    TORCH_TYPES,
    blocks,
    materialise,
    require_all_to_train,
    skeleton,
    whole_pieces,
)
from trainctl.train.models.recompute import wrap_blocks
from trainctl.train.models.varlen import has_flash_attention, use_varlen
from trainctl.train.models.weights import WeightSource
from trainctl.train.objectives.base import loss_of
from trainctl.train.objectives.distillation import attach_teacher, sides_of
from trainctl.train.objectives.loss import LanguageModel
from trainctl.train.optimizers import own_optimizer, parameter_groups
from trainctl.train.parallel.experts import keep_local_experts
from trainctl.train.parallel.pipeline import cut_to_stage, stages_of_rank, tied_weight
from trainctl.train.parallel.routers import Routers
from trainctl.train.parallel.tensor import shard_model, sum_partial_gradients, vocabulary_of
from trainctl.train.stability import Replay, StepGuard

if TYPE_CHECKING:
    from trainctl.train.rollouts.steps import RolloutData


@dataclass(slots=True)
class Session:
    """Everything of a rank that the training loop uses."""

    plan: RunPlan
    run: RunPaths
    process: Process
    mesh: ProcessMesh
    corpora: Corpora
    """Tokenized text, by source."""
    tokenizer: Tokenizer
    engine: Engine
    state: OptimizerState
    buffers: list[Buffer]
    """Persistent buffers of this rank's part of the model."""
    training: TrainingData
    held_out: dict[str, PackedDataset]
    """Held-out samples, by source."""
    progress: RunProgress
    gradients: Gradients
    """Gradients of a step, before its update."""
    average: WeightAverage | None
    """Moving average of the weights, if the run keeps one."""
    guard: StepGuard
    """Judge of each step before its update."""
    norms: NormHistory
    """Gradient norms of the last updates, and the clipping threshold."""
    learning_rate: LearningRate
    """Learning rate of the schedule, as changed by evaluations and rewinds."""
    routers: Routers
    """Routers of the model's experts."""
    shapes: dict[str, list[int]]
    """Shape of every trained parameter, whole, by canonical name."""
    frozen: int
    """Number of elements of all frozen parameters."""
    manifest_entries: dict[str, Any]
    """Manifest entries about the frozen weights and an adapter; empty if all weights train."""
    wrapped_blocks: int
    """Number of decoder blocks whose activations are recomputed."""
    replay: Replay
    """Recorded losses of steps that an earlier attempt has done, to compare with."""
    resumed_from: Path | None
    """Checkpoint that this attempt resumed from, if any."""
    manifest: Mapping[str, Any]
    """Manifest of that checkpoint, without its fragments; empty at a first start."""
    skipped_checkpoints: tuple[str, ...]
    """Problems of the newer checkpoints that were skipped."""
    checkpoint_read: tuple[float, int]
    """Seconds and bytes of the checkpoint's files that this rank has verified; else zeros."""
    rollouts: RolloutData | None = None
    """Source of the steps' data, if the model samples them."""

    @property
    def num_trained(self) -> int:
        """Number of trained parameters."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_parameters(self) -> int:
        return self.num_trained + self.frozen

    @property
    def saved_buffers(self) -> list[Buffer]:
        """Buffers that this rank writes: those of its stage on the stage's first rank."""
        mesh = self.mesh
        is_first = mesh.replicas.is_first and mesh.tensor.is_first
        return self.buffers if is_first else []

    @property
    def average_begins(self) -> bool:
        """Whether the run keeps an average that the checkpoint it resumed from does not have."""
        if self.average is None or self.resumed_from is None:
            return False
        return self.average.steps == 0 and self.progress.step > 0

    @property
    def origin(self) -> dict[str, Any]:
        """Manifest entries that tell where weights come from, the same at every step."""
        model = self.plan.config.model
        return {
            "run": manifest_run_id(self.run) or "",
            "model": model_description(model, self.shapes),
            "multipliers": multipliers(model),
            **self.manifest_entries,
        }

    def restore(self, manifest: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Restore what a manifest holds besides weights, optimizer states, position and callbacks.

        Args:
            rewound: Whether the running process rewinds, rather than a new one resumes.
        """
        self.guard.restore(manifest.get("stability", {}), rewound=rewound)
        self.norms.restore(manifest.get("norms", []))
        if self.average is not None:
            self.average.restore(manifest.get("ema", {}))
        self.learning_rate.restore(manifest.get("learning_rate", {}), rewound=rewound)


Tell = Callable[[str], None]


def assemble(
    plan: RunPlan, run: RunPaths, process: Process, tell: Tell = lambda _: None
) -> Session:
    """Build this rank's model, engine and data, at the newest checkpoint if the run has one.

    All ranks call it together. `tell` receives what this rank is doing.
    """
    config, room = plan.config, engine_backend(plan)
    plan = room.settle_plan(plan, run, process)
    corpora = load_corpora(run.corpus, config.data)
    checkpoint = _newest_checkpoint(run, process, corpora)
    progress = checkpoint.progress if checkpoint else RunProgress()
    mesh = _join_mesh(plan, process)
    training = TrainingData.of(plan, corpora, data_rank=mesh.data.index, data_size=mesh.data.size)
    held_out = held_out_data(plan, corpora)
    attach_teacher(plan, run, process, sides_of(corpora, held_out, training), tell)
    part = _make_model_part(plan, run, process, mesh, checkpoint)
    engine = room.build(_make_job(plan, process, mesh, part))
    state = OptimizerState(engine, config.optimizer)
    average = _make_average(plan, state)
    if checkpoint is not None:
        checkpoint.check_states(set().union(*process.gather(state.all_names())))
        checkpoint.load_into(state)
        engine.resume_at(progress.step)
        if engine.loss_scale is not None:
            engine.loss_scale.restore(checkpoint.manifest.get("loss_scale", {}))
    manifest = dict(checkpoint.manifest) if checkpoint else {}
    manifest.pop("fragments", None)
    session = Session(
        plan=plan,
        run=run,
        process=process,
        mesh=mesh,
        corpora=corpora,
        tokenizer=load_tokenizer(config.tokenizer),
        engine=engine,
        state=state,
        buffers=part.buffers,
        training=training,
        held_out=held_out,
        progress=progress,
        gradients=Gradients(engine, process, config),
        average=average,
        guard=StepGuard(config.stability, norm_may_overflow=engine.loss_scale is not None),
        norms=NormHistory.of(config),
        learning_rate=LearningRate(plan),
        routers=part.routers,
        shapes=part.shapes,
        frozen=part.frozen,
        manifest_entries=part.manifest_entries,
        wrapped_blocks=part.wrapped_blocks,
        replay=Replay.of(run, plan, process, progress.step),
        resumed_from=checkpoint.path if checkpoint else None,
        manifest=manifest,
        skipped_checkpoints=checkpoint.passed_over if checkpoint else (),
        checkpoint_read=checkpoint.verified if checkpoint else (0.0, 0),
    )
    if checkpoint is not None:
        session.restore(checkpoint.manifest)
    return session


@dataclass(frozen=True, slots=True)
class _ModelPart:
    """A rank's part of the model, filled with weights; the other fields are the session's."""

    model: PreTrainedModel
    pieces: Pieces
    buffers: list[Buffer]
    routers: Routers
    shapes: dict[str, list[int]]
    frozen: int
    manifest_entries: dict[str, Any]
    wrapped_blocks: int


def _make_model_part(
    plan: RunPlan,
    run: RunPaths,
    process: Process,
    mesh: ProcessMesh,
    checkpoint: CheckpointReader | None,
) -> _ModelPart:
    config, device = plan.config, process.device
    model = plan_skeleton(plan)
    require_all_to_train(model)
    routers = Routers(model, config)
    tensor_group = mesh.tensor.group if mesh.tensor.size > 1 else None
    whole = FullModel.of(config.model, model)
    source, entries, shapes = _weight_source(plan, run, process, whole, checkpoint)
    frozen = sum(math.prod(whole.shapes[name]) for name in whole.shapes.keys() - shapes.keys())
    buffers = persistent_buffers(model)
    wrapped = wrap_blocks(model, config.activation_checkpointing, tensor_group)
    if precision_of(config.precision).build:
        function_of("precision", config.precision.compute)(model, config.precision)
    pieces = shard_skeleton(model, plan, mesh)
    buffers = remaining_buffers(model, buffers)
    make = engine_backend(plan).parameter_maker(plan, model, device, mesh)
    pieces = materialise(model, source, device, pieces, make, buffers)
    apply_kernels(model, config.kernels)
    return _ModelPart(model, pieces, buffers, routers, shapes, frozen, entries, wrapped)


def plan_skeleton(plan: RunPlan) -> PreTrainedModel:
    """Return the module tree of a plan's model, whose attention reads what the plan says."""
    config = plan.config
    model = skeleton(config.model, TORCH_TYPES[number_formats(config.precision).weights])
    if reads_document_bounds(config, plan.hardware):
        use_varlen(model)
    return model


def shard_skeleton(model: PreTrainedModel, plan: RunPlan, mesh: ProcessMesh) -> Pieces:
    """Cut a whole skeleton to this rank's part; return the pieces of the remaining parameters."""
    pieces = whole_pieces(model)
    if mesh.expert.size > 1:  # before the stages, some of which may have no experts
        pieces = keep_local_experts(model, pieces, mesh)
    if mesh.pipeline.size > 1:
        own = plan.stages_of(mesh.pipeline.index)
        held = [block for stage in own for block in plan.stages[stage]]
        cut_to_stage(model, held, mesh.pipeline)
        here = set(model.parameters())
        first = mesh.pipeline.is_first  # the first of the two stages with a tied weight saves it
        end = None if first else tied_weight(model, mesh.pipeline)
        pieces = {
            parameter: replace(piece, is_saved_here=not (parameter is end and piece.is_embedding))
            for parameter, piece in pieces.items()
            if parameter in here
        }
    if mesh.tensor.size > 1:
        sharded = plan.config.parallelism.sequence_sharded_norms
        pieces = shard_model(model, pieces, mesh.tensor, sequence_sharded_norms=sharded)
    return pieces


def _make_job(plan: RunPlan, process: Process, mesh: ProcessMesh, part: _ModelPart) -> Job:
    """Return the engine's job: the model with its loss, parameter groups and optimizer."""
    config, z_loss = plan.config, plan.config.stability.z_loss
    model, pieces = part.model, part.pieces
    sum_partial_gradients(pieces, mesh.tensor, mesh.timeout)
    if config.gradients.centralize:
        centralize(model, pieces, mesh.tensor if mesh.tensor.size > 1 else None)
    groups = parameter_groups(pieces, config, lr_scale=plan.lr_scale)
    module: nn.Module
    tied = None
    if mesh.pipeline.size > 1:
        module = stages_of_rank(model, plan, mesh)
        if config.model.tie_word_embeddings and not mesh.pipeline.is_folded:
            tied = tied_weight(model, mesh.pipeline)
    else:
        vocabulary = vocabulary_of(model, mesh.tensor)
        objective = loss_of(config.objective, vocabulary)
        future_weight = getattr(config.objective, "future_weight", None)
        module = LanguageModel(
            model, vocabulary, config.kernels, z_loss, part.routers, objective, future_weight
        )
    return Job(
        plan=plan,
        process=process,
        mesh=mesh,
        module=module,
        pieces=pieces,
        groups=groups,
        optimizer=own_optimizer(plan, groups),
        tied=tied,
        flash_attention=has_flash_attention(model),
        blocks=tuple(blocks(model)),
    )


def _join_mesh(plan: RunPlan, process: Process) -> ProcessMesh:
    is_folded, shard_ranks = plan.config.parallelism.is_folded, plan.shard_ranks
    rank, timeout = process.rank, process.timeout
    return join_mesh(plan.mesh, rank, timeout, shard_ranks=shard_ranks, is_folded=is_folded)


def _make_average(plan: RunPlan, state: OptimizerState) -> WeightAverage | None:
    decay, every = plan.config.training.ema_decay, plan.config.training.ema_every_steps
    return None if decay is None else WeightAverage(state, decay=decay, every_steps=every)


def _newest_checkpoint(
    run: RunPaths, process: Process, corpora: Corpora
) -> CheckpointReader | None:
    """Return the checkpoint to resume from, if the run has one; on all ranks together.

    Raises:
        TrainctlError: The checkpoint was trained on another corpus.
    """
    checkpoint = newest_valid_checkpoint(run, process)
    others = changed_sources(corpora, checkpoint.manifest) if checkpoint is not None else []
    if checkpoint is not None and others:
        of = "" if others == [SINGLE_SOURCE] else f" of {', '.join(others)}"
        raise RunStateError(
            f"{checkpoint.path.name} was trained on another corpus{of}",
            hint="restore the files, or start a new run",
        )
    return checkpoint


def _weight_source(
    plan: RunPlan,
    run: RunPaths,
    process: Process,
    whole: FullModel,
    checkpoint: CheckpointReader | None,
) -> tuple[WeightSource, dict[str, Any], dict[str, list[int]]]:
    """Return the source of the weights; give the whole skeleton the run's adapter.

    Returns:
        The source; manifest entries about the frozen weights; shapes of the trained parameters.
    """
    config, model = plan.config, whole.skeleton
    if checkpoint is not None and not is_partial(config):
        checkpoint.check(config.model, whole.shapes)
        return checkpoint, {}, dict(whole.shapes)
    if checkpoint is None:
        base = initial_base(whole, config, run, process)
    else:
        check_trainable(config, checkpoint.path.name, checkpoint.manifest)
        facts = checkpoint.manifest["base"]
        base = recorded_base(facts, whole, kept=run.base, process=process)
    apply_adapter(model, config)
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    source = base.source
    if checkpoint is not None:
        checkpoint.check(config.model, shapes)
        source = OverlayWeights(checkpoint, shapes, source)
    elif low_rank(config.adapter) is not None:
        beside = dequantized_source(source, config.model, low_rank(config.adapter))
        own = initial_adapter(config.training.seed, config, beside, whole.shapes)
        source = OverlayWeights(own, shapes.keys() - whole.shapes.keys(), source)
    quantize(model, config)
    return quantized_source(source, config, process.device), manifest_entries(config, base), shapes


def seed_step(seed: int, step: int, replica: int) -> None:
    """Seed the randomness within a step (dropout) by (seed, step, replica): no state to save.

    Tensor ranks of a replica draw the same masks for the activations that all of them have.
    """
    mixed = seed * 0x9E3779B1 + step * 0x85EBCA6B + replica * 0xC2B2AE35
    torch.manual_seed(mixed % (1 << 63))
