"""Training with plain DeepSpeed on forked ranks: no trainer around its engine.

The model is a class of transformers with trainctl's initial weights, and the batches are those of
trainctl's own order, so that losses can be compared with those of a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from rank_processes import Case, prepare_once, server
from ranks import _joined

from trainctl.data.corpora import load_corpora
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


def train(world_size: int, trainings: list[Training]) -> list[dict[int, float]]:
    """Train each on the same fresh processes; return the losses by step."""
    for training in trainings:
        training.case.run.root.mkdir(parents=True, exist_ok=True)
        prepare_once(training.case.plan, training.case.run)
    return server().run("plain_deepspeed:train_on_rank", trainings, world_size, SECONDS)[0]


def train_on_rank(trainings: list[Training]) -> list[dict[int, float]]:
    """Train each on this rank; return the losses by step."""
    with _joined(trainings[0].case) as process:
        return [_train(training, process) for training in trainings]


def _train(training: Training, process: Process) -> dict[int, float]:
    plan = training.case.plan
    model = _model(training)
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
    data = TrainingData.of(plan, corpora, data_rank=process.rank, data_size=process.world_size)
    losses = {}
    for step in range(engine.global_steps, training.steps):
        batches = data.step(step * plan.batch.global_batch_size, plan.batch)
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
        engine.save_checkpoint(str(training.save), client_state={"universal_checkpoint_info": {}})
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
        "train_batch_size": batch.global_batch_size,
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
