"""Adapters and frozen weights on every layout that a plan allows, held against one process."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parity_cases import LAYOUTS, Combination, Curve, _config
from rank_processes import Case, curve, train_cases

from trainctl.config.registry import new_section
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.plan.resolve import resolve
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths

CLIPPING = 0.25
"""Gradients of adapters are smaller than those of whole weights."""

TRAINED: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "lora": {"kind": "lora", "targets": ["q_proj", "v_proj", "down_proj"]},
    "lora-all": {"kind": "lora", "rank": 4, "alpha": 8.0},
    "rslora": {"kind": "rslora", "targets": ["q_proj", "o_proj"]},
    "dora": {"kind": "dora", "targets": ["q_proj", "down_proj"]},
    "embeddings": {"freeze": ["embeddings"]},
    "last-blocks": {"freeze": ["all_but_last_blocks:2"]},
    "some": {"freeze": ["mlp", "norm", "embeddings"]},
}
"""What trains."""


@dataclass(frozen=True, order=True)
class Adapting:
    """What trains, and where.

    Attributes:
        trained: One of `TRAINED`.
        layout: One of `LAYOUTS`.
        stage: Of ZeRO.
        checkpointing: Recomputation, by name.
        precision: fp32 or bf16.
        model: A family, untied if so named.
    """

    trained: str = "lora"
    layout: str = "1"
    stage: str = "0"
    checkpointing: str = "none"
    precision: str = "fp32"
    model: str = "llama-untied"

    def __str__(self) -> str:
        return " ".join(
            (self.trained, self.layout, self.stage, self.checkpointing, self.precision, self.model)
        )

    @property
    def reference(self) -> Adapting:
        """The same on one process, without ZeRO."""
        return replace(self, layout="1", stage="0", checkpointing="none")

    @property
    def combination(self) -> Combination:
        """Of the layout alone."""
        return Combination(
            self.layout,
            self.stage,
            checkpointing=self.checkpointing,
            precision=self.precision,
            model=self.model,
        )


def config_of(case: Adapting, steps: int, **changes: Any) -> RunConfig:
    """The tiny model's."""
    config = _config(case.combination, steps, Path("/nvme"))
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
    """The plan of a case, and what is wrong with it."""
    size = case.combination.world_size
    hardware = Hardware(name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=size)
    resolution = resolve(config_of(case, steps), hardware)
    return resolution.plan, tuple(item for item in resolution.findings if item.is_error)


def train(case: Adapting, folder: Path, *, steps: int) -> Curve:
    """Train a case; loss and gradient norm by step."""
    plan, refusal = judged(case, steps)
    assert plan is not None, refusal
    run = RunPaths(Path(tempfile.mkdtemp(dir=folder)))
    train_cases(case.combination.world_size, [Case(plan, run)])
    return curve(run)


def everything() -> list[Adapting]:
    """The whole product, what plans refuse among it."""
    layouts = [name for name in LAYOUTS if name != "TP2xPP2xDP2"]
    cells = itertools.product(TRAINED, layouts, "0123", ("none", "full"))
    return [Adapting(*cell) for cell in cells]
