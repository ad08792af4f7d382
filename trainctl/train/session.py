"""Putting a rank together: model, engine, data and, on resume, the state to go on from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.registry import function_of
from trainctl.data.corpora import Corpora, load_corpora, others_than
from trainctl.data.tokenizer import Tokenizer, load_tokenizer
from trainctl.engines.choose import engine_room
from trainctl.engines.mesh import ProcessMesh, join_mesh
from trainctl.engines.process import Process
from trainctl.engines.protocol import Engine, Job
from trainctl.engines.shards import Pieces
from trainctl.errors import ExitCode, TrainctlError
from trainctl.options.adapter import low_rank
from trainctl.options.objective import objective_of
from trainctl.options.precision import precision_of
from trainctl.plan.identity import check_trained
from trainctl.plan.mixture import SOLE
from trainctl.plan.precision import formats
from trainctl.plan.trainable import is_partial
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.train.adapters.layers import choose_trained, initial_adapter
from trainctl.train.adapters.quantized import dequantized, quantize, quantized
from trainctl.train.checkpoint.average import WeightAverage
from trainctl.train.checkpoint.content import Checkpoint, RunProgress
from trainctl.train.checkpoint.optimizer_state import OptimizerState
from trainctl.train.checkpoint.restore import newest_intact
from trainctl.train.clipping import NormHistory
from trainctl.train.data import PackedDataset, TrainingData, held_out_data
from trainctl.train.gradient_changes import centralize
from trainctl.train.gradients import Gradients
from trainctl.train.groups import parameter_groups
from trainctl.train.learning_rate import LearningRate
from trainctl.train.models import build
from trainctl.train.models.frozen_base import (
    Layered,
    Whole,
    facts_of,
    initial_base,
    recorded_base,
)
from trainctl.train.models.kernels import apply_kernels
from trainctl.train.models.model import (
    TORCH_TYPES,
    blocks,
    has_flash_attention,
    require_all_to_train,
    skeleton,
)
from trainctl.train.models.recompute import wrap_blocks
from trainctl.train.models.tensors import Buffer, persistent_buffers, those_of
from trainctl.train.models.weights import WeightSource
from trainctl.train.objectives.base import loss_of
from trainctl.train.objectives.loss import LanguageModel
from trainctl.train.optimizers import own_optimizer
from trainctl.train.parallel.experts import cut_experts
from trainctl.train.parallel.pipeline import PipelineStage, cut_to_stage, tied_weight
from trainctl.train.parallel.routers import Routers
from trainctl.train.parallel.tensor import shard_model, sum_partial_gradients, vocabulary_of
from trainctl.train.patience import Patience
from trainctl.train.replay import Replay
from trainctl.train.stability import Divergence, Guard


@dataclass(slots=True)
class Session:
    """Everything that the training loop uses."""

    plan: RunPlan
    run: RunPaths
    process: Process
    mesh: ProcessMesh
    corpora: Corpora
    """The text, by source."""
    tokenizer: Tokenizer
    engine: Engine
    state: OptimizerState
    buffers: list[Buffer]
    """Persistent ones of what this rank has of the model."""
    training: TrainingData
    held_out: dict[str, PackedDataset]
    """What of it is held out, by source."""
    progress: RunProgress
    patience: Patience
    """How long the held-out loss has not improved."""
    gradients: Gradients
    """Those of a step, before its update."""
    average: WeightAverage | None
    """That of the weights, if the run keeps one."""
    guard: Guard
    """Judges each step before its update."""
    divergence: Divergence
    """Notices a loss that stays far above what the run had reached."""
    norms: NormHistory
    """Those of the last updates, and what the gradient is clipped at."""
    learning_rate: LearningRate
    """The schedule's, and what evaluations and rewinds make of it."""
    routers: Routers
    """Those of the model's experts."""
    shapes: dict[str, list[int]]
    """That of every parameter that trains, by canonical name."""
    frozen: int
    """Elements of all others."""
    beside: dict[str, Any]
    """What a manifest says of those, and of an adapter; empty where all train."""
    wrapped_blocks: int
    """Decoder blocks whose activations are recomputed."""
    replay: Replay
    """Steps that an earlier attempt has done already, to compare with."""
    resumed_from: Path | None
    """The checkpoint that this attempt goes on from, if any."""
    passed_over: tuple[str, ...]
    """What is wrong with the newer ones."""

    @property
    def num_trained(self) -> int:
        """Parameters that train."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def num_parameters(self) -> int:
        return self.num_trained + self.frozen

    @property
    def saved_buffers(self) -> list[Buffer]:
        """Those that this rank writes: of its stage, the first of the ranks that all have them."""
        mesh = self.mesh
        is_first = mesh.replicas.is_first and mesh.tensor.is_first
        return self.buffers if is_first else []

    @property
    def average_begins(self) -> bool:
        """Whether the run keeps an average that the checkpoint it goes on from does not have."""
        if self.average is None or self.resumed_from is None:
            return False
        return self.average.steps == 0 and self.progress.step > 0

    def restore(self, manifest: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Go on from what a checkpoint says of the run, besides weights, states and position.

        Args:
            rewound: In the running process, by an intervention.
        """
        training = self.plan.config.training
        self.patience = Patience(
            training.stop_patience, manifest.get("patience"), min_delta=training.stop_min_delta
        )
        self.guard.restore(manifest.get("stability", {}), rewound=rewound)
        self.divergence.restore(manifest.get("divergence", {}))
        self.norms.restore(manifest.get("norms", []))
        if self.average is not None:
            self.average.restore(manifest.get("ema", {}))
        self.learning_rate.restore(manifest.get("learning_rate", {}), rewound=rewound)


def assemble(plan: RunPlan, run: RunPaths, process: Process) -> Session:
    """Build this rank's model, engine and data, at the newest checkpoint if the run has one."""
    config, room = plan.config, engine_room(plan)
    plan = room.settle_plan(plan, run, process)
    corpora = load_corpora(run.corpus, config.data)
    checkpoint = _newest(run, process, corpora)
    progress = checkpoint.progress if checkpoint else RunProgress()
    mesh = join_mesh(plan.mesh, process.rank, process.timeout)
    model = skeleton(config.model, TORCH_TYPES[formats(config.precision).weights])
    require_all_to_train(model)
    routers = Routers(model, config)
    tensor_group = mesh.tensor.group if mesh.tensor.size > 1 else None
    whole = Whole.of(config.model, model)
    source, beside, shapes = _weights(plan, run, process, whole, checkpoint)
    frozen = sum(math.prod(whole.shapes[name]) for name in whole.shapes.keys() - shapes.keys())
    buffers = persistent_buffers(model)
    wrapped = wrap_blocks(model, config.activation_checkpointing, tensor_group)
    if precision_of(config.precision).build:
        function_of("precision", config.precision.compute)(model, config.precision)
    pieces = place(model, plan, mesh)
    buffers = those_of(model, buffers)
    pieces = build.materialise(
        model,
        source,
        process.device,
        pieces,
        room.parameter_maker(plan, model, process.device, mesh),
        buffers,
    )
    apply_kernels(model, config.kernels)
    engine = room.build(_job(plan, process, mesh, model, pieces, routers))
    state = OptimizerState(engine, config.optimizer)
    average = _average(plan, state)
    if checkpoint is not None:
        checkpoint.check_states(set().union(*process.gather(state.all_names())))
        checkpoint.load_into(state)
        engine.resume_at(progress.step)
        if engine.loss_scale is not None:
            engine.loss_scale.restore(checkpoint.manifest.get("loss_scale", {}))
    session = Session(
        plan=plan,
        run=run,
        process=process,
        mesh=mesh,
        corpora=corpora,
        tokenizer=load_tokenizer(config.tokenizer),
        engine=engine,
        state=state,
        buffers=buffers,
        training=TrainingData.of(
            plan, corpora, data_rank=mesh.data.index, data_size=mesh.data.size
        ),
        held_out=held_out_data(plan, corpora),
        progress=progress,
        patience=Patience(config.training.stop_patience, min_delta=config.training.stop_min_delta),
        gradients=Gradients(engine, process, config),
        average=average,
        guard=Guard(config.stability, norm_may_overflow=engine.loss_scale is not None),
        divergence=Divergence(
            config.model.vocab_size if objective_of(config.objective).is_entropy else None
        ),
        norms=NormHistory.of(config),
        learning_rate=LearningRate(plan),
        routers=routers,
        shapes=shapes,
        frozen=frozen,
        beside=beside,
        wrapped_blocks=wrapped,
        replay=Replay.of(run, plan, process, progress.step),
        resumed_from=checkpoint.path if checkpoint else None,
        passed_over=checkpoint.passed_over if checkpoint else (),
    )
    if checkpoint is not None:
        session.restore(checkpoint.manifest)
    return session


def place(model: PreTrainedModel, plan: RunPlan, mesh: ProcessMesh) -> Pieces:
    """Cut a whole skeleton to what this rank has of it; the pieces of what is left."""
    pieces = build.whole_pieces(model)
    if mesh.expert.size > 1:  # before the stages, some of which may have none
        pieces = cut_experts(model, pieces, mesh.expert)
    if mesh.pipeline.size > 1:
        cut_to_stage(model, plan.stages[mesh.pipeline.index], mesh.pipeline)
        here = set(model.parameters())
        first = mesh.pipeline.is_first  # of the two stages that have a tied weight, it saves it
        pieces = {
            parameter: replace(piece, is_saved_here=first or not piece.is_embedding)
            for parameter, piece in pieces.items()
            if parameter in here
        }
    if mesh.tensor.size > 1:
        sharded = plan.config.parallelism.sequence_sharded_norms
        pieces = shard_model(model, pieces, mesh.tensor, sequence_sharded_norms=sharded)
    return pieces


def _job(
    plan: RunPlan,
    process: Process,
    mesh: ProcessMesh,
    model: PreTrainedModel,
    pieces: Pieces,
    routers: Routers,
) -> Job:
    """What the engine gets: the model with its loss, and what its update is made by."""
    config, z_loss = plan.config, plan.config.stability.z_loss
    sum_partial_gradients(pieces, mesh.tensor)
    if config.gradients.centralize:
        centralize(model, pieces, mesh.tensor if mesh.tensor.size > 1 else None)
    groups = parameter_groups(pieces, config, lr_scale=plan.lr_scale)
    module: nn.Module
    tied = None
    if mesh.pipeline.size > 1:
        module = PipelineStage(model, mesh, z_loss)
        if config.model.tie_word_embeddings:
            tied = tied_weight(model, mesh.pipeline)
    else:
        vocabulary = vocabulary_of(model, mesh.tensor)
        objective = loss_of(config.objective)
        module = LanguageModel(model, vocabulary, config.kernels, z_loss, routers, objective)
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


def _average(plan: RunPlan, state: OptimizerState) -> WeightAverage | None:
    training = plan.config.training
    if training.ema_decay is None:
        return None
    every = training.ema_every_steps
    return WeightAverage(state, decay=training.ema_decay, every_steps=every)


def _newest(run: RunPaths, process: Process, corpora: Corpora) -> Checkpoint | None:
    """Return the checkpoint to go on from."""
    checkpoint = newest_intact(run, process)
    others = others_than(corpora, checkpoint.manifest) if checkpoint is not None else []
    if checkpoint is not None and others:
        of = "" if others == [SOLE] else f" of {', '.join(others)}"
        raise TrainctlError(
            f"{checkpoint.path.name} was trained on another corpus{of}",
            hint="restore the files, or start a new run",
            exit_code=ExitCode.run_state,
        )
    return checkpoint


def _weights(
    plan: RunPlan,
    run: RunPaths,
    process: Process,
    whole: Whole,
    checkpoint: Checkpoint | None,
) -> tuple[WeightSource, dict[str, Any], dict[str, list[int]]]:
    """Where the values of a whole skeleton come from, which gets the run's adapter.

    Returns:
        The source; what manifests say of weights that do not train; the shapes of those that do.
    """
    config, model = plan.config, whole.skeleton
    if checkpoint is not None and not is_partial(config):
        checkpoint.check(config.model, whole.shapes)
        return checkpoint, {}, dict(whole.shapes)
    if checkpoint is None:
        base = initial_base(whole, config, run, process)
    else:
        check_trained(config, checkpoint.path.name, checkpoint.manifest)
        facts = checkpoint.manifest["base"]
        base = recorded_base(facts, whole, kept=run.base, process=process)
    choose_trained(model, config)
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    source = base.source
    if checkpoint is not None:
        checkpoint.check(config.model, shapes)
        source = Layered(checkpoint, shapes, source)
    elif low_rank(config.adapter) is not None:
        beside = dequantized(source, config.model, low_rank(config.adapter))
        own = initial_adapter(config.training.seed, config, beside, whole.shapes)
        source = Layered(own, shapes.keys() - whole.shapes.keys(), source)
    quantize(model, config)
    return quantized(source, config, process.device), facts_of(config, base), shapes


def seed_step(seed: int, step: int, replica: int) -> None:
    """Make what is random within a step (dropout) a function of (seed, step, replica): no state.

    Tensor ranks of a replica draw the same for the activations that they all have.
    """
    mixed = seed * 0x9E3779B1 + step * 0x85EBCA6B + replica * 0xC2B2AE35
    torch.manual_seed(mixed % (1 << 63))
