"""Steps of the Trainer and of accelerate by a configuration, on the samples of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from foreign_tools import Leg, Training, _InOrder, samples
from rank_processes import Case, prepare_once, server
from ranks import _joined
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, TrainingArguments

Step = tuple[float, float]
"""Loss and learning rate."""


@dataclass(frozen=True)
class Foreign:
    """Steps to train in one process.

    Attributes:
        case: Run with the same initial weights and samples.
        arguments: Arguments of the Trainer, or accelerate's configuration.
    """

    case: Case
    arguments: dict[str, Any]


def train(foreign: Foreign) -> list[Step]:
    """Return loss and rate of each step."""
    foreign.case.run.root.mkdir(parents=True, exist_ok=True)
    if not foreign.case.run.corpus.exists():
        prepare_once(foreign.case.plan, foreign.case.run)
    return server().run("imported_steps:train_on_rank", foreign, 1, 300.0)[0]


def train_on_rank(foreign: Foreign) -> list[Step]:
    """Train on this rank."""
    with _joined([foreign.case]):
        training = Training(foreign.case, "trainer", (Leg(0),))
        tokens, _ = samples(training, foreign.case.plan.total_steps)
        model = AutoModelForCausalLM.from_pretrained(
            foreign.case.plan.config.model.initial_weights, dtype=torch.float32
        )
        if "deepspeed_config" in foreign.arguments:
            return _accelerate(foreign, model, tokens)
        folder = str(foreign.case.run.root / "unused")
        made = _InOrder(
            model,
            TrainingArguments(folder, **foreign.arguments),
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        )
        made.train()
        entries = [each for each in made.state.log_history if "loss" in each]
        return [(float(each["loss"]), float(each["learning_rate"])) for each in entries]


def _accelerate(foreign: Foreign, model: Any, tokens: torch.Tensor) -> list[Step]:
    """Train as accelerate's examples do: AdamW, clipping, and a scheduler of torch's."""
    plan, keys = foreign.case.plan, foreign.arguments["deepspeed_config"]
    section, steps = plan.config.optimizer, plan.total_steps
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=keys["gradient_accumulation_steps"]
    )
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
    )
    scheduler = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    found, losses = [], []
    for rows in tokens.split(plan.batch.micro_batch_size):
        with accelerator.accumulate(model):
            loss = model(input_ids=rows, labels=rows).loss
            losses.append(float(loss.detach()))
            rate = float(optimizer.param_groups[0]["lr"])
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), keys["gradient_clipping"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append((sum(losses) / len(losses), rate))
            losses = []
    return found
