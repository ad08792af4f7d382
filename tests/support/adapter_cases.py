"""Adapters and frozen weights on every layout that a plan allows, compared with one process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from parity_cases import Combination, Curve, layout_config
from rank_processes import Case, curve, train_cases
from transformers import AutoModelForCausalLM

from trainctl.config.registry import new_section
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.options.adapter import BaseWeights
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.train.models.model import transformers_config

STEPS = 6

CLIPPING = 0.25
"""Clipping threshold, low because gradients of adapters are smaller than those of full weights."""

TRAINED: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"kind": "lora", "targets": ["q_proj", "v_proj", "down_proj"]},
    "lora-all": {"kind": "lora", "rank": 4, "alpha": 8.0},
    "rslora": {"kind": "rslora", "targets": ["q_proj", "o_proj"]},
    "dora": {"kind": "dora", "targets": ["q_proj", "down_proj"]},
    "int8": {"kind": "lora", "targets": ["q_proj", "down_proj"], "base_weights": BaseWeights.int8},
    "nf4": {"kind": "lora", "rank": 4, "alpha": 8.0, "base_weights": BaseWeights.nf4},
    "nf4-double": {
        "kind": "lora",
        "targets": ["q_proj", "v_proj", "down_proj"],
        "base_weights": BaseWeights.nf4_double,
    },
    "dora-nf4": {
        "kind": "dora",
        "targets": ["q_proj", "down_proj"],
        "base_weights": BaseWeights.nf4_double,
    },
    "lora-also": {
        "kind": "lora",
        "targets": ["q_proj", "down_proj"],
        "also_train": ["embeddings", "head"],
    },
    "embeddings": {"freeze": ["embeddings"]},
    "last-blocks": {"freeze": ["all_but_last_blocks:2"]},
    "some": {"freeze": ["mlp", "norm", "embeddings"]},
}
"""Choices of the trainable weights."""


@dataclass(frozen=True, order=True)
class Adapting:
    """Choice of trainable weights and layout."""

    trained: str = "lora"
    layout: str = "1"
    stage: str = "0"
    checkpointing: str = "none"
    offload: str = "none"
    """Optimizer offload, by name."""
    precision: str = "fp32"
    """fp32 or bf16."""
    model: str = "llama-untied"
    """Model family; the name says if the embeddings are untied."""

    def __str__(self) -> str:
        return " ".join(map(str, astuple(self)))

    @property
    def reference(self) -> Adapting:
        """Return the same case on one process without ZeRO."""
        return replace(self, layout="1", stage="0", checkpointing="none", offload="none")

    @property
    def combination(self) -> Combination:
        """Return the case without its choice of trainable weights."""
        return Combination(
            self.layout,
            self.stage,
            self.offload,
            checkpointing=self.checkpointing,
            precision=self.precision,
            model=self.model,
        )


def config_of(case: Adapting, steps: int, **changes: Any) -> RunConfig:
    """Return the configuration of the tiny model."""
    config = layout_config(case.combination, steps, Path("/nvme"))
    values = dict(TRAINED[case.trained])
    config.training.freeze = values.pop("freeze", [])
    if values:
        if case.model.startswith("gpt2"):
            values["targets"] = ["c_attn", "c_proj"]
        config.adapter = new_section("adapter", values.pop("kind"), **values, **changes)
        config.optimizer.lr = 5e-3
    config.optimizer.gradient_clipping = CLIPPING
    return config


def judged(case: Adapting, steps: int = 30) -> tuple[RunPlan | None, tuple[Finding, ...]]:
    """Return the plan of a case, and its errors."""
    size = case.combination.world_size
    hardware = Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=size)
    resolution = resolve(config_of(case, steps), hardware)
    return resolution.plan, tuple(item for item in resolution.findings if item.is_error)


def train(case: Adapting, folder: Path, *, steps: int) -> Curve:
    """Train a case; return loss and gradient norm by step."""
    plan, refusal = judged(case, steps)
    assert plan is not None, refusal
    run = RunPaths(Path(tempfile.mkdtemp(dir=folder)))
    train_cases(case.combination.world_size, [Case(plan, run)])
    return curve(run)


def train_all(
    cases: Collection[Adapting], folder: Path, *, steps: int = STEPS
) -> dict[Adapting, Curve]:
    """Train as `train` does; cases with the same world size share their processes."""
    runs = {case: RunPaths(Path(tempfile.mkdtemp(dir=folder))) for case in sorted(cases)}
    sizes: dict[int, list[Case]] = {}
    for case, run in runs.items():
        plan, refusal = judged(case, steps)
        assert plan is not None, refusal
        sizes.setdefault(case.combination.world_size, []).append(Case(plan, run))
    for size, of_size in sizes.items():
        train_cases(size, of_size, together=True)
    return {case: curve(run) for case, run in runs.items()}


def everything() -> list[Adapting]:
    """Return the whole product of `scripts/parity_adapters.py`, including what plans refuse."""
    trained = (
        "full",
        "lora-all",
        "lora-also",
        "dora",
        "nf4-double",
        "dora-nf4",
        "int8",
        "last-blocks",
        "some",
    )
    layouts = ("1", "DP2", "TP2", "PP2", "SP2")
    cells = itertools.product(trained, layouts, "0123", ("none", "full"))
    return [Adapting(*cell) for cell in cells] + [
        Adapting(each, "DP2", stage, offload="cpu") for each in trained for stage in "123"
    ]


def base_directory(folder: Path, **shape: int) -> Path:
    """Write a transformers directory of the tiny model with weights; the given keys change its
    shape.
    """
    config = replace(config_of(Adapting(), 1).model, **shape)
    model = AutoModelForCausalLM.from_config(transformers_config(config))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.05, generator=generator)
    model.save_pretrained(folder)
    return folder
