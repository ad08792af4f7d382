"""Journeys of a training: begun in another tool, continued in trainctl, and back in the tool.

Each function returns the largest difference of a loss, in nats, from the tool's own training, which
continues from its own checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foreign_tools import Leg, Losses, Training, train
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.registry import new_section
from trainctl.config.schema import RunConfig
from trainctl.migration.checkpoints import to_universal
from trainctl.migration.checkpoints.source import open_source
from trainctl.migration.checkpoints.to_torch import export_dcp
from trainctl.migration.checkpoints.trainer import export_trainer
from trainctl.migration.checkpoints.write import import_source
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths

BEGUN, LEFT, STEPS = 3, 6, 9
"""Steps after which the tool saves, after which trainctl saves, and at the end."""
PROCESSES = 2


@dataclass(frozen=True)
class Layout:
    """Layout on which trainctl continues."""

    stage: int = 0
    tensor: int = 1
    pipeline: int = 1
    engine: str = "deepspeed"
    processes: int = PROCESSES

    @property
    def name(self) -> str:
        if self.processes == 1:
            return "1 process"
        if self.engine == "fsdp2":
            return "FSDP2"
        axes = {"tensor": self.tensor, "pipeline": self.pipeline}
        cut = " x ".join(f"{axis} {size}" for axis, size in axes.items() if size > 1)
        return cut or f"ZeRO {self.stage}"

    def plan(self) -> RunPlan:
        """Return the plan of a run whose updates are those of `foreign_tools`."""
        config = config_of_run()
        config.zero_stage.stage = self.stage
        config.engine = new_section("engine", self.engine)
        config.parallelism.tensor, config.parallelism.pipeline = self.tensor, self.pipeline
        return tiny_plan(config, self.processes)


LAYOUTS = {
    "trainer": Layout(stage=3),
    "zero1": Layout(stage=1, tensor=2),
    "zero2": Layout(stage=1, pipeline=2),
    "zero3": Layout(stage=2),
    "fsdp2": Layout(stage=1, pipeline=2),
    "fsdp2-flat": Layout(stage=3, tensor=2),
}
"""Layout of each tool's journey."""


def config_of_run() -> RunConfig:
    """Return a tiny model of two layers, with Adam at a constant rate."""
    config = tiny_config(
        steps=STEPS,
        sequence_length=32,
        model__num_layers=2,
        model__hidden_size=32,
        model__intermediate_size=64,
        optimizer__lr=1e-3,
        optimizer__decay_embeddings=True,
        checkpoint__every_steps=LEFT - BEGUN,
    )
    config.schedule = new_section("schedule", "constant", warmup_fraction=0.0)
    return config


def export_for(tool: str, config: RunConfig, checkpoint: Path, out: Path) -> None:
    """Export what the tool continues from; the Trainer with DeepSpeed needs two exports in one."""
    if tool.startswith("fsdp2"):
        export_dcp(config, checkpoint, out)
        return
    export_trainer(config, checkpoint, out)
    if tool != "trainer":
        universal = out.with_name("universal")
        to_universal.export(config, checkpoint, universal)
        for path in universal.iterdir():
            path.rename(out / path.name)


def train_in_tools(folder: Path, tools: list[str]) -> dict[str, Losses]:
    """Train with each tool, saving after `BEGUN` steps and continuing from there in a new trainer;
    return all losses.
    """
    trainings = []
    for tool in tools:
        root = folder / tool
        legs = (Leg(BEGUN, save=root / "out"), Leg(STEPS, load=_saved(root / "out", tool)))
        trainings.append(Training(Case(tiny_plan(config_of_run(), 2), RunPaths(root)), tool, legs))
    return dict(zip(tools, train(PROCESSES, trainings), strict=True))


def continue_in_trainctl(
    folder: Path,
    expected: dict[str, Losses],
    layouts: Mapping[str, Layout] = LAYOUTS,
    name: str = "run",
) -> dict[str, float]:
    """Import each tool's checkpoint and train to the end on another layout, in runs of a name."""
    cases = []
    for tool in expected:
        plan, run = layouts[tool].plan(), RunPaths(folder / tool / name)
        import_source(open_source(folder / tool / "out"), plan, run.root)
        cases.append(Case(plan, run))
    (processes,) = {layouts[tool].processes for tool in expected}
    train_cases(processes, cases, together=True)
    found = {}
    for tool, case in zip(expected, cases, strict=True):
        losses = {step: loss for step, (loss, _) in curve(case.run).items()}
        assert list(losses) == list(range(BEGUN + 1, STEPS + 1))
        found[tool] = _difference(losses, expected[tool])
    return found


def continue_in_tools(folder: Path, expected: dict[str, Losses]) -> dict[str, float]:
    """Export each run at step `LEFT`, and train to the end in the tool that it came from."""
    trainings = []
    for tool in expected:
        run, root = RunPaths(folder / tool / "run"), folder / tool
        out = _saved(root / "back", tool, LEFT)
        config = LAYOUTS[tool].plan().config
        export_for(tool, config, run.checkpoints / f"step-{LEFT:08d}", out)
        case = Case(tiny_plan(config_of_run(), 2), RunPaths(root))
        trainings.append(Training(case, tool, (Leg(STEPS, load=out),)))
    losses = dict(zip(expected, train(PROCESSES, trainings), strict=True))
    return {tool: _difference(losses[tool], expected[tool]) for tool in expected}


def _saved(folder: Path, tool: str, step: int = BEGUN) -> Path:
    return folder / f"{'step' if tool.startswith('fsdp2') else 'checkpoint'}-{step}"


def _difference(losses: Losses, expected: Losses) -> float:
    assert losses
    return max(abs(loss - expected[step]) for step, loss in losses.items())
