"""Training with plain DeepSpeed on forked ranks: no trainer around its engine.

The model is a class of transformers with trainctl's initial weights, and the batches are those of
trainctl's own order, so that losses can be compared with those of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from rank_processes import Case, prepare_once, server
from ranks import _joined
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from trainctl.data.corpora import load_corpora
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.process import Process
from trainctl.train.data import TrainingData
from trainctl.train.models.model import materialise, skeleton, whole_pieces
from trainctl.train.models.weights import SeedWeights

SECONDS = 300.0


@dataclass(frozen=True)
class Training:
    """One training with plain DeepSpeed."""

    case: Case
    """Model, data and hyperparameters."""
    stage: int
    steps: int
    """Last step."""
    load: Path | None = None
    """Directory of the checkpoint to begin from, if any."""
    save: Path | None = None
    """Directory to save in at the end, if any."""
    universal: bool = False
    """Whether `load` is a universal checkpoint."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's JSON."""
    two_groups: bool = False
    """Whether vectors are a parameter group of their own, without weight decay."""
    frozen: tuple[str, ...] = ()
    """Parameters that do not train."""
    pipeline: bool = False
    """Whether each rank is a stage of DeepSpeed's `PipelineModule`."""


def train(world_size: int, trainings: list[Training]) -> list[dict[int, float]]:
    """Train each on the same fresh processes; return the losses by step."""
    for training in trainings:
        training.case.run.root.mkdir(parents=True, exist_ok=True)
        prepare_once(training.case.plan, training.case.run)
    return server().run("plain_deepspeed:train_on_rank", trainings, world_size, SECONDS)[0]


def train_on_rank(trainings: list[Training]) -> list[dict[int, float]]:
    """Train each on this rank; return the losses by step."""
    with _joined([trainings[0].case]) as process:
        return [_train(training, process) for training in trainings]


def _train(training: Training, process: Process) -> dict[int, float]:
    plan = training.case.plan
    model: torch.nn.Module = _model(training)
    if training.pipeline:
        model = pipeline_module(model, process.world_size)
    groups = _groups(model, training)
    config = _config(training, process.world_size)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=config, dist_init_required=False
    )
    if training.load is not None:
        path, _ = engine.load_checkpoint(str(training.load))
        assert path is not None
        for state in engine.optimizer.optimizer.state.values() if training.universal else ():
            if not torch.is_tensor(state["step"]):  # torch's Adam needs a tensor (ZeRO 3)
                state["step"] = torch.tensor(float(state["step"]))
    corpora = load_corpora(training.case.run.corpus, plan.config.data)
    size = plan.mesh.data
    data = TrainingData.of(plan, corpora, data_rank=process.rank % size, data_size=size)
    losses = {}
    for step in range(engine.global_steps, training.steps):
        batches = data.step(step * plan.batch.global_batch_size, plan.batch)
        if training.pipeline:
            losses[step + 1] = float(engine.train_batch(_pairs(batches)))
            continue
        total = torch.zeros(())
        for batch in batches:
            logits = engine(input_ids=batch.model_inputs(torch.device("cpu"))["input_ids"]).logits
            labels = batch.labels
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        (losses[step + 1],) = (each / process.world_size for each in process.sum(float(total)))
    if training.save is not None:
        engine.save_checkpoint(str(training.save))
    process.barrier()
    engine.destroy()
    return losses


def _model(training: Training) -> torch.nn.Module:
    config = training.case.plan.config
    model = skeleton(config.model, torch.float32)
    weights = SeedWeights.of(config.model, model, config.training.seed)
    materialise(model, weights, torch.device("cpu"), whole_pieces(model), None, [])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in training.frozen)
    return model


def _pairs(batches: Iterable[MicroBatch]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((batch.input_ids, batch.labels) for batch in batches)


class _Embedding(torch.nn.Embedding):
    """First and last layer of a pipeline, with one weight."""

    @staticmethod
    def scores(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, module.weight)


class _Block(LlamaDecoderLayer):
    """Decoder layer that makes its own positions."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        return super().forward(
            hidden, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
        )


def pipeline_module(model: Any, stages: int) -> torch.nn.Module:
    """Return a Llama with tied embeddings as layers of a pipeline, with its weights."""
    config = model.config
    embedding = (config.vocab_size, config.hidden_size)
    made = PipelineModule(
        [
            TiedLayerSpec("embed", _Embedding, *embedding),
            *(LayerSpec(_Block, config, index) for index in range(config.num_hidden_layers)),
            LayerSpec(LlamaRMSNorm, config.hidden_size, config.rms_norm_eps),
            TiedLayerSpec("embed", _Embedding, *embedding, forward_fn=_Embedding.scores),
        ],
        num_stages=stages,
        loss_fn=lambda scores, labels: F.cross_entropy(scores.flatten(0, 1), labels.flatten()),
        partition_method="uniform",
    )
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            layer, _, rest = name.partition(".")
            source = "model.norm.weight" if rest == "weight" else "model.embed_tokens.weight"
            if layer.isdecimal() and rest != "weight":
                source = f"model.layers.{int(layer) - 1}.{rest}"
            parameter.copy_(weights[source])
    return made


def _groups(model: torch.nn.Module, training: Training) -> Any:
    trained = [each for each in model.parameters() if each.requires_grad]
    if not training.two_groups:
        return trained
    decay = training.case.plan.config.optimizer.weight_decay
    return [
        {"params": [each for each in trained if each.dim() > 1], "weight_decay": decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]


def _config(training: Training, world_size: int) -> dict[str, Any]:
    plan = training.case.plan
    optimizer, batch = plan.config.optimizer, plan.batch
    return {
        # DeepSpeed counts tensor-parallel ranks as replicas here.
        "train_batch_size": batch.global_batch_size * plan.mesh.tensor,
        "train_micro_batch_size_per_gpu": batch.micro_batch_size,
        "gradient_clipping": optimizer.gradient_clipping,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": optimizer.lr,
                "betas": [optimizer.beta1, optimizer.beta2],
                "eps": optimizer.epsilon,
                "weight_decay": optimizer.weight_decay,
                "torch_adam": True,
            },
        },
        "zero_optimization": {
            "stage": training.stage,
            "stage3_param_persistence_threshold": 1000,
            "sub_group_size": 60_000,
            "reduce_bucket_size": 500_000,
            "allgather_bucket_size": 500_000,
        },
        "zero_allow_untested_optimizer": True,
        **({"checkpoint": {"load_universal": True}} if training.universal else {}),
        **training.settings,
    }
