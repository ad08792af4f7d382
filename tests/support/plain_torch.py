"""Reference run in a few lines of torch on one process, which every engine should reproduce."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rank_processes import prepare_once, tiny_plan
from torch import nn

from trainctl.config.schema import AdaptiveClipping, RunConfig
from trainctl.data.corpora import load_corpora
from trainctl.plans.types import Batch
from trainctl.runs.layout import RunPaths
from trainctl.train.data import TrainingData
from trainctl.train.gradients import standard_normal
from trainctl.train.models.model import materialise, skeleton
from trainctl.train.models.weights import SeedWeights


@dataclass
class PlainRun:
    """Result of the run."""

    curve: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Loss (cross entropy alone) and gradient norm by step."""
    limits: list[float] = field(default_factory=list)
    """Clipping threshold of the gradient norm by step."""
    z_losses: list[float] = field(default_factory=list)
    """z-loss by step."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights before the first step, by canonical name."""
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    """Gradients of the first step before clipping, by canonical name."""


def plain_torch(config: RunConfig, folder: Path, *, steps: int) -> PlainRun:
    """Train the config's first steps: AdamW, a constant learning rate, fp32, whole batches."""
    plan, run = tiny_plan(config, 1), RunPaths(folder)
    run.attempt(1).root.mkdir(parents=True)
    prepare_once(plan, run)
    seed = config.training.seed
    model = skeleton(config.model, torch.float32)
    pieces = materialise(model, SeedWeights.of(config.model, model, seed), torch.device("cpu"))
    length, size = plan.batch.sequence_length, plan.batch.global_batch_size
    data = TrainingData.of(plan, load_corpora(run.corpus, config.data), data_rank=0, data_size=1)
    whole = Batch(
        global_batch_size=size,
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        sequence_length=length,
    )
    decayed = [p for p, piece in pieces.items() if p.dim() > 1 and not piece.is_embedding]
    others = [p for p in pieces if not any(p is q for q in decayed)]
    rule, gradients = config.optimizer, config.gradients
    groups = [
        {"params": decayed, "weight_decay": rule.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (rule.beta1, rule.beta2)
    optimizer = torch.optim.AdamW(groups, lr=rule.lr, betas=betas, eps=rule.epsilon)
    result, norms = PlainRun(), []
    for step in range(steps):
        (batch,) = data.step(step * size, whole)
        logits = model(input_ids=batch.input_ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        z_loss = config.stability.z_loss * logits.logsumexp(dim=-1).square().mean()
        result.z_losses.append(z_loss.item())
        (loss + z_loss).backward()
        if gradients.centralize:
            # Decays every weight of nn.Linear, whose shape is (outputs, inputs).
            for parameter in decayed:
                parameter.grad -= parameter.grad.mean(dim=1, keepdim=True)
        norm = float(torch.cat([p.grad.flatten().double() for p in pieces]).norm())
        result.curve[step + 1] = (loss.item(), norm)
        if step == 0:
            result.weights = {piece.name: p.detach().clone() for p, piece in pieces.items()}
            result.gradients = {piece.name: p.grad.clone() for p, piece in pieces.items()}
        for parameter, piece in pieces.items():
            if gradients.clip_value > 0:
                parameter.grad.clamp_(-gradients.clip_value, gradients.clip_value)
            if gradients.noise > 0:
                variance = gradients.noise / (1 + step) ** gradients.noise_decay
                numbers = standard_normal(
                    f"{seed}/{step}/{piece.name}", torch.arange(parameter.numel())
                )
                parameter.grad += (variance**0.5 * numbers).view(parameter.shape)
        for entry in rule.groups:  # each is one group: all of it is decayed, or none
            own = [p for p, piece in pieces.items() if re.search(entry.match, piece.name)]
            nn.utils.clip_grad_norm_(own, entry.gradient_clipping)
        norm = float(torch.cat([p.grad.flatten().double() for p in pieces]).norm())
        limit = rule.gradient_clipping
        if gradients.adaptive_clipping is AdaptiveClipping.percentile:
            limit = float(np.percentile([*norms, norm], gradients.adaptive_percentile))
        elif gradients.adaptive_clipping is AdaptiveClipping.mean and norms:
            limit = gradients.adaptive_factor * float(np.mean(norms))
        result.limits.append(limit)
        norms.append(norm)
        nn.utils.clip_grad_norm_(list(pieces), limit)
        optimizer.step()
        optimizer.zero_grad()
    return result
