"""Training with tools that trainctl takes checkpoints from, on forked ranks: transformers' Trainer,
alone and with DeepSpeed, and FSDP2 with torch's distributed checkpoints.

The batches are those of trainctl's own order, so that losses can be compared with those of a run.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import save_fsdp_model, save_fsdp_optimizer
from rank_processes import Case, prepare_once, server
from ranks import _joined
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import PreTrainedModel

from trainctl.data.corpora import load_corpora
from trainctl.plans.types import Batch
from trainctl.train.data import TrainingData
from trainctl.train.models.model import transformers_config

SECONDS = 300.0
Losses = dict[int, float]
"""Mean loss of each step's batch, before its update, by step."""


@dataclass(frozen=True)
class Leg:
    """A part of a training, in one process of the tool."""

    stop: int
    """Last step."""
    load: Path | None = None
    """Checkpoint to continue from."""
    save: Path | None = None
    """Folder to save in, of the tool, at the end."""


@dataclass(frozen=True)
class Training:
    """A training with one tool.

    Attributes:
        case: Model, data and hyperparameters, as a run of trainctl would have them.
        tool: `trainer`; `zero1` to `zero3`, the Trainer with DeepSpeed; `fsdp2`, or `fsdp2-flat`
            with a flattened state dict of the optimizer.
    """

    case: Case
    tool: str
    legs: tuple[Leg, ...]


def train(world_size: int, trainings: list[Training]) -> list[Losses]:
    """Train each on the same fresh processes; return the losses of all its legs."""
    for training in trainings:
        training.case.run.root.mkdir(parents=True, exist_ok=True)
        if not training.case.run.corpus.exists():
            prepare_once(training.case.plan, training.case.run)
    return server().run("foreign_tools:train_on_rank", trainings, world_size, SECONDS)[0]


def train_on_rank(trainings: list[Training]) -> list[Losses]:
    """Train each on this rank; return the losses."""
    with _joined([trainings[0].case]):
        found = []
        for training in trainings:
            losses: Losses = {}
            for leg in training.legs:
                run = _train_fsdp2 if training.tool.startswith("fsdp2") else _train_trainer
                losses |= run(training, leg)
            found.append(losses)
        return found


def samples(training: Training, steps: int) -> tuple[torch.Tensor, int]:
    """Return the tokens of the first steps in trainctl's order, and the samples of a step.

    A sample has one token more than a sequence, since models of transformers shift labels.
    """
    plan = training.case.plan
    corpora = load_corpora(training.case.run.corpus, plan.config.data)
    data = TrainingData.of(plan, corpora, data_rank=0, data_size=1)
    size = plan.batch.global_batch_size
    whole = Batch(
        global_batch_size=size,
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        sequence_length=plan.batch.sequence_length,
    )
    batches = [data.step(step * size, whole)[0] for step in range(steps)]
    rows = [torch.cat((each.input_ids, each.labels[:, -1:]), dim=1) for each in batches]
    return torch.cat(rows), size


def _model(training: Training) -> PreTrainedModel:
    torch.manual_seed(5)
    return AutoModelForCausalLM.from_config(
        transformers_config(training.case.plan.config.model), dtype=torch.float32
    )


class _InOrder(Trainer):
    """The Trainer with samples in their order."""

    def _get_train_sampler(self, *_: Any) -> SequentialSampler:
        return SequentialSampler(self.train_dataset)


class _StepTensors(TrainerCallback):
    """Makes the step counts of a loaded universal checkpoint tensors, as torch's Adam needs."""

    def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
        for state in getattr(optimizer, "state", {}).values():
            if "step" in state and not torch.is_tensor(state["step"]):
                state["step"] = torch.tensor(float(state["step"]))


def _train_trainer(training: Training, leg: Leg) -> Losses:
    plan = training.case.plan
    optimizer, batch = plan.config.optimizer, plan.batch
    tokens, _ = samples(training, plan.total_steps)
    world = dist.get_world_size()
    folder = leg.save or training.case.run.root / "unused"
    stage = int(training.tool[4:]) if training.tool.startswith("zero") else None
    arguments = TrainingArguments(
        str(folder),
        max_steps=leg.stop,
        per_device_train_batch_size=batch.micro_batch_size,
        gradient_accumulation_steps=batch.global_batch_size // (batch.micro_batch_size * world),
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.gradient_clipping,
        lr_scheduler_type="constant",
        save_strategy="steps" if leg.save else "no",
        save_steps=leg.stop,
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to=[],
        use_cpu=True,
        include_num_input_tokens_seen=True,
        deepspeed=None if stage is None else _deepspeed(stage, leg),
    )
    made = _InOrder(
        _model(training),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[_StepTensors()],
    )
    made.train(resume_from_checkpoint=None if leg.load is None else str(leg.load))
    # Otherwise the next tool in these processes would still be told of DeepSpeed.
    unset_hf_deepspeed_config()
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    AcceleratorState._reset_state(reset_partial_state=True)
    entries = made.state.log_history
    begun = 0 if leg.load is None else int(leg.load.name.rpartition("-")[2])
    return {e["step"]: float(e["loss"]) for e in entries if "loss" in e and e["step"] > begun}


def _deepspeed(stage: int, leg: Leg) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": leg.load is not None and leg.load.parent.name == "back"},
    }


FSDP_FORMS = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


def _save_as_accelerate(model: PreTrainedModel, optimizer: Any, folder: Path) -> None:
    """Save by accelerate's functions in each of its forms.

    Its `Accelerator` has FSDP on accelerators only, and a stand-in of it is all that they need.
    """
    state = PartialState(cpu=True)
    stand_in: Any = SimpleNamespace(
        process_index=state.process_index,
        num_processes=state.num_processes,
        is_main_process=state.is_main_process,
        wait_for_everyone=state.wait_for_everyone,
        is_fsdp2=True,
    )
    for form in FSDP_FORMS:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=form)
        out = str(folder / form)
        save_fsdp_model(plugin, stand_in, model, out)
        save_fsdp_optimizer(plugin, stand_in, optimizer, model, out)


def _train_fsdp2(training: Training, leg: Leg) -> Losses:
    plan, rank, world = training.case.plan, dist.get_rank(), dist.get_world_size()
    section = plan.config.optimizer
    tokens, size = samples(training, plan.total_steps)
    model = _model(training)
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [each for each in model.parameters() if each.dim() > 1]},
            {
                "params": [each for each in model.parameters() if each.dim() < 2],
                "weight_decay": 0.0,
            },
        ],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
    )
    options = StateDictOptions(flatten_optimizer_state_dict=training.tool == "fsdp2-flat")
    begun = 0
    if leg.load is not None:
        weights, state = get_state_dict(model, optimizer, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(leg.load))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=weights,
            optim_state_dict=state,
            options=options,
        )
        begun = int(leg.load.name.rpartition("-")[2])
    losses: Losses = {}
    for step in range(begun, leg.stop):
        rows = tokens[step * size : (step + 1) * size][rank::world]
        logits = model(input_ids=rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.gradient_clipping)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world
        dist.all_reduce(total)
        losses[step + 1] = float(total)
    if leg.save is not None:
        weights, state = get_state_dict(model, optimizer, options=options)
        folder = leg.save / f"step-{leg.stop}"
        dcp.save(
            {"model": weights, "optimizer": state, "step": leg.stop}, checkpoint_id=str(folder)
        )
        _save_as_accelerate(model, optimizer, leg.save.parent)
    return losses
