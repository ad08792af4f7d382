"""A whole run of an adapter against PEFT's model in a plain loop of torch, on the same batches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from adapter_cases import Adapting, base_directory, config_of
from rank_processes import Case, curve, tiny_plan, train_cases
from transformers import AutoModelForCausalLM

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.data.corpora import load_corpora
from trainctl.plans.trainable import LORA_A, trainable
from trainctl.runs.layout import RunPaths
from trainctl.train.adapters.layers import initial_adapter
from trainctl.train.data import TrainingData
from trainctl.train.models.weights import SeedWeights

STEPS = 20


def curve_of_peft(config: RunConfig, base: Path, run: RunPaths) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step, on the corpus of a run, from where an adapter starts."""
    adapter, rule = config.adapter, config.optimizer
    layers = trainable(config).adapted
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        peft.LoraConfig(
            r=adapter.rank,
            lora_alpha=adapter.alpha,
            target_modules=[layer.name for layer in layers],
        ),
    )
    nothing = SeedWeights(0, std=0.0)
    start = initial_adapter(config.training.seed, config, nothing, {})
    for layer in layers:
        their = model.get_submodule(f"base_model.model.{layer.name}").lora_A.default.weight
        values = start.read(f"{layer.name}.{LORA_A}", their.shape, 0, their.numel())
        their.data.copy_(values.view(their.shape))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained,
        lr=rule.lr,
        betas=(rule.beta1, rule.beta2),
        eps=rule.epsilon,
        weight_decay=rule.weight_decay,
    )
    plan = tiny_plan(config, 1)
    data = TrainingData.of(plan, load_corpora(run.corpus, config.data), data_rank=0, data_size=1)
    size = plan.batch.global_batch_size
    whole = replace(plan.batch, micro_batch_size=size, gradient_accumulation_steps=1)
    made = []
    for step in range(STEPS):
        (batch,) = data.step(step * size, whole)
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, rule.gradient_clipping)
        made.append((loss.item(), float(norm)))
        optimizer.step()
        optimizer.zero_grad()
    return made


@pytest.mark.slow
def test_the_curve_matches_peft(tmp_path: Path) -> None:
    base = base_directory(tmp_path / "base")
    config = config_of(Adapting("lora-all"), STEPS)
    config.model.initial_weights = str(base)
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    run = RunPaths(tmp_path / "run")
    train_cases(1, [Case(tiny_plan(config, 1), run)])
    ours, theirs = list(curve(run).values()), curve_of_peft(config, base, run)
    assert len(ours) == len(theirs) == STEPS and ours[-1][0] < ours[0][0] - 0.1
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    for step, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our[0] == pytest.approx(their[0], abs=1e-5), step
        assert our[1] == pytest.approx(their[1], rel=1e-4), step
