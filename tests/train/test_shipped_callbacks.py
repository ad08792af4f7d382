"""Numbers of the shipped callbacks, against direct computations in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop
from torch import nn

from trainctl.config.schema import RunConfig
from trainctl.data.corpora import load_corpora
from trainctl.plans.types import Batch
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.data import TrainingData
from trainctl.train.models.model import blocks, materialise, skeleton
from trainctl.train.models.weights import SeedWeights

LAYERS = {"layer_statistics": {"every_steps": 1}}
NOISE = {"gradient_noise_scale": {"every_steps": 1, "decay": 0.5}}


def config_of(callbacks: dict[str, Any], **changes: Any) -> RunConfig:
    config = tiny_config(**{"steps": 2, "evaluation_samples": 0, "sequence_length": 32, **changes})
    config.callbacks = callbacks
    return config


def recorded(run: RunPaths, name: str) -> list[dict[str, Any]]:
    found = [event for event in read_events(run.events) if event["event"] == "callback"]
    return [each["values"] for each in found if each["name"] == name]


def trained(folder: Path, config: RunConfig, processes: int = 2) -> RunPaths:
    run = RunPaths(folder)
    train_cases(processes, [Case(tiny_plan(config, processes), run)])
    return run


def first_batch(config: RunConfig, folder: Path) -> tuple[nn.Module, Any]:
    """Return the model at its first weights, and the first global batch as one micro-batch."""
    plan, run = tiny_plan(config, 1), RunPaths(folder)
    model = skeleton(config.model, torch.float32)
    source = SeedWeights.of(config.model, model, config.training.seed)
    materialise(model, source, torch.device("cpu"))
    size = plan.batch.global_batch_size
    data = TrainingData.of(plan, load_corpora(run.corpus, config.data), data_rank=0, data_size=1)
    whole = Batch(
        global_batch_size=size,
        micro_batch_size=size,
        gradient_accumulation_steps=1,
        sequence_length=plan.batch.sequence_length,
    )
    (batch,) = data.step(0, whole)
    return model, batch


def layer_of(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else None


LAYOUTS = {
    "zero0": ({}, 2),
    "zero1-accumulating": ({"zero_stage__stage": 1, "gradient_accumulation_steps": 4}, 2),
    "zero2-recomputing": ({"zero_stage__stage": 2, "activation_checkpointing__mode": "full"}, 2),
    "zero3": ({"zero_stage__stage": 3}, 2),
    "fsdp2": ({"zero_stage__stage": 3, "engine__kind": "fsdp2"}, 2),
    "tensor": ({"parallelism__tensor": 2}, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_statistics_of_layers_match_plain_torch(tmp_path: Path, layout: str) -> None:
    changes, processes = LAYOUTS[layout]
    config = config_of(LAYERS, **changes)
    config.checkpoint.at_end = False
    found = recorded(trained(tmp_path / "run", config, processes), "layers")
    others = recorded(RunPaths(tmp_path / "run"), "others")
    plain_config = config_of({})
    plain = plain_torch(plain_config, tmp_path / "plain", steps=1)
    model, batch = first_batch(plain_config, tmp_path / "plain")
    rms: list[float] = []
    dead: list[float] = []
    for block in blocks(model):
        block.register_forward_hook(
            lambda _, __, output: rms.append(float(output.double().square().mean() ** 0.5))
        )
        block.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: dead.append(
                float((inputs[0].abs().flatten(0, 1).amax(0) <= 1e-6).double().mean())
            )
        )
    with torch.no_grad():
        model(input_ids=batch.input_ids)
    assert found[0]["activation_rms"] == pytest.approx(rms, rel=1e-5)
    assert found[0]["dead_share"] == dead
    norms = [0.0] * len(rms)
    for name, gradient in plain.gradients.items():
        square = float(gradient.double().square().sum())
        layer = layer_of(name)
        if layer is None:
            assert others[0]["gradient_norm"][name] == pytest.approx(square**0.5, rel=1e-4)
        else:
            norms[layer] += square
    assert found[0]["gradient_norm"] == pytest.approx([n**0.5 for n in norms], rel=1e-4)


def test_dead_units_are_counted_over_all_ranks(tmp_path: Path) -> None:
    """A bound between the units' largest activations splits them as in one process."""
    model_folder = tmp_path / "plain"
    plain_torch(config_of({}), model_folder, steps=1)
    model, batch = first_batch(config_of({}), model_folder)
    largest: list[torch.Tensor] = []
    for block in blocks(model):
        block.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: largest.append(inputs[0].abs().flatten(0, 1).amax(0))
        )
    with torch.no_grad():
        model(input_ids=batch.input_ids)
    bound = float(torch.cat(largest).median()) * 1.0001
    config = config_of({"layer_statistics": {"every_steps": 1, "dead_below": bound}}, steps=1)
    (found,) = recorded(trained(tmp_path / "run", config), "layers")
    expected = [float((units <= bound).double().mean()) for units in largest]
    assert 0.2 < expected[0] < 0.8 and found["dead_share"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_update_ratios_match_the_weights(tmp_path: Path, stage: int) -> None:
    config = config_of(LAYERS, zero_stage__stage=stage, schedule__warmup_steps=0)
    config.checkpoint.at_end, config.checkpoint.every_steps = False, 1
    run = trained(tmp_path / "run", config)
    saved = [CheckpointReader(run.checkpoints / f"step-{step:08}") for step in (1, 2)]
    shapes = {name: torch.Size(shape) for name, shape in saved[0].manifest["shapes"].items()}
    weights = [
        {name: each.read(name, shape, 0, shape.numel()) for name, shape in shapes.items()}
        for each in saved
    ]
    found = recorded(run, "layers")[1]
    for layer, ratio in enumerate(found["update_ratio"]):
        names = [name for name in weights[0] if layer_of(name) == layer]
        old = math.fsum(float(weights[0][n].double().square().sum()) for n in names)
        moved = math.fsum(
            float((weights[1][n].double() - weights[0][n].double()).square().sum()) for n in names
        )
        assert ratio == pytest.approx((moved / old) ** 0.5, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "processes"),
    [
        ({"zero_stage__stage": 0}, 2),
        ({"zero_stage__stage": 2, "gradient_accumulation_steps": 4}, 2),
        ({"zero_stage__stage": 3}, 2),
        ({}, 1),
    ],
)
def test_noise_scale_matches_single_gradients(
    tmp_path: Path, changes: dict[str, Any], processes: int
) -> None:
    config = config_of(NOISE, **changes)
    config.checkpoint.at_end = False
    plan = tiny_plan(config, processes)
    found = recorded(trained(tmp_path / "run", config, processes), "noise_scale")[0]
    plain_torch(config_of({}), tmp_path / "plain", steps=1)
    model, batch = first_batch(config_of({}), tmp_path / "plain")
    size, parts = plan.batch.micro_batch_size, []
    for first in range(0, len(batch.input_ids), size):
        ids, labels = (each[first : first + size] for each in (batch.input_ids, batch.labels))
        model.zero_grad()
        loss = nn.functional.cross_entropy(
            model(input_ids=ids).logits.flatten(0, 1), labels.flatten()
        )
        loss.backward()
        parts.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    tokens, n = batch.labels.numel(), size * batch.labels.shape[1]
    small = sum(float(p.square().sum()) for p in parts) / len(parts)
    large = float((sum(parts) / len(parts)).square().sum())
    noise = (small - large) / (1 / n - 1 / tokens)
    signal = large - noise / tokens
    assert found["batch_tokens"] == tokens
    assert found["noise"] == pytest.approx(noise, rel=1e-3)
    assert found["gradient_squared"] == pytest.approx(signal, rel=1e-2, abs=1e-4 * large)


def test_shipped_callbacks_change_nothing_and_survive_a_resume(tmp_path: Path) -> None:
    both = {"layer_statistics": {"every_steps": 2}, "gradient_noise_scale": {"every_steps": 2}}
    changes = {"steps": 6, "zero_stage__stage": 2, "gradient_accumulation_steps": 4}
    plan, plain = (tiny_plan(config_of(each, **changes), 2) for each in (both, {}))
    runs = {name: RunPaths(tmp_path / name) for name in ("whole", "parts", "plain")}
    train_cases(2, [Case(plan, runs["whole"]), Case(plain, runs["plain"])])
    train_cases(2, [Case(with_stop(plan, 3), runs["parts"])])
    train_cases(2, [Case(plan, runs["parts"], attempt=2)])
    assert curve(runs["whole"]) == curve(runs["plain"]) == curve(runs["parts"])
    for name in ("layers", "others", "noise_scale"):
        assert len(recorded(runs["whole"], name)) == 3
        assert recorded(runs["parts"], name) == recorded(runs["whole"], name)
