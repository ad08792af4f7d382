"""The moving average of the weights: by its formula, resumed, evaluated and exported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from poison import NAN, Poisoned, train_poisoned
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases
from safetensors.torch import load_file
from test_export import held_out_loss

from trainctl.config.schema import DataType, OffloadDevice, OnBadLoss, RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.checkpoint.content import CheckpointReader
from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER
from trainctl.train.evaluation import inference
from trainctl.train.export.directory import export
from trainctl.train.models.loaded import load
from trainctl.train.models.model import skeleton
from trainctl.train.models.weights import SeedWeights

STEPS, HALF, DECAY = 6, 4, 0.22
Weights = dict[str, torch.Tensor]


def averaged(stage: int, *, averages: bool = True) -> RunConfig:
    """Stages 1 and 2 in bf16; an average at every second step, and a checkpoint at each."""
    is_narrow = stage in (1, 2)
    few = {"sequence_length": 64, "global_batch_size": 4} if is_narrow else {}
    return tiny_config(
        steps=STEPS,
        **few,
        evaluate_every_steps=2,
        zero_stage__stage=stage,
        precision__compute="bf16" if is_narrow else "fp32",
        optimizer__lr=3e-3,
        checkpoint__every_steps=1,
        checkpoint__keep=STEPS,
        **({"ema_decay": DECAY, "ema_every_steps": 2} if averages else {}),
    )


def case_of(config: RunConfig, folder: Path, attempt: int = 1) -> Case:
    return Case(tiny_plan(config, 2), RunPaths(folder), attempt)


def cut_off(source: Case, config: RunConfig) -> Case:
    """Copy a run without its checkpoints after step HALF, and return a case that resumes it on 2
    ranks.
    """
    folder = source.run.root.with_name(f"{source.run.root.name}-at-{config.zero_stage.stage}")
    shutil.copytree(source.run.root, folder)
    for step in range(HALF + 1, STEPS + 1):
        shutil.rmtree(folder / "checkpoints" / path_of(source, step).name)
    return case_of(config, folder, 2)


def path_of(case: Case, step: int = STEPS) -> Path:
    return case.run.checkpoints / f"step-{step:08d}"


def weights_of(case: Case, step: int = STEPS, state: str = AVERAGE) -> Weights:
    """Whole, from the checkpoint of a step."""
    source = CheckpointReader(path_of(case, step), weights=state)
    shapes = {name: torch.Size(shape) for name, shape in source.manifest["shapes"].items()}
    return {name: source.read(name, shape, 0, shape.numel()) for name, shape in shapes.items()}


def by_formula(case: Case) -> dict[int, Weights]:
    """Compute the weight average by step, from the master weights of every second checkpoint."""
    config, shapes = case.plan.config, CheckpointReader(path_of(case)).manifest["shapes"]
    whole_model = skeleton(config.model, torch.float32)
    seeded = SeedWeights.of(config.model, whole_model, config.training.seed)
    dtype = torch.float32 if config.precision.compute == DataType.fp32 else torch.bfloat16
    average = {}
    for name, shape in shapes.items():
        whole = seeded.read(name, torch.Size(shape), 0, torch.Size(shape).numel())
        average[name] = whole.to(dtype).float()
    found = {1: average}
    for step, left in ((2, 2 / 11), (4, DECAY), (6, DECAY)):  # (1 + t) / (10 + t): 2/11, 3/12
        weights = weights_of(case, step, MASTER)
        average = {n: left * average[n] + (1 - left) * weights[n] for n in weights}
        found[step] = average
    return found


def assert_close(found: Weights, expected: Weights, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=0, atol=tolerance)


def assert_evaluated(case: Case) -> None:
    """Assert that the recorded losses of weights and average are those of models loaded from the
    checkpoint.
    """
    recorded = [event for event in read_events(case.run.events) if event["event"] == "evaluation"]
    assert [event["step"] for event in recorded] == [2, 4, 6]
    losses = recorded[-1]
    assert abs(losses["ema_loss"] - losses["loss"]) > 1e-3
    for state, key in ((MASTER, "loss"), (AVERAGE, "ema_loss")):
        model = load(case.plan, path_of(case), "cpu", _unseen, weights=state)
        with inference(model.model):
            assert held_out_loss(model.score, case) == pytest.approx(losses[key], abs=1e-4)


@pytest.mark.slow
def test_the_average_at_every_stage(tmp_path: Path) -> None:
    """Saved as its formula says, evaluated without a trace, resumed there and elsewhere."""
    cases = [case_of(averaged(stage), tmp_path / f"{stage}") for stage in range(4)]
    without = case_of(averaged(3, averages=False), tmp_path / "without")
    train_cases(2, [*cases, without], together=True)
    for case in cases:
        for step, expected in by_formula(case).items():
            assert_close(weights_of(case, step), expected, 1e-6)
        assert_evaluated(case)
    assert curve(cases[3].run) == curve(without.run)

    same = [cut_off(cases[stage], averaged(stage)) for stage in (1, 3)]
    moved = [cut_off(cases[0], averaged(3)), cut_off(cases[3], averaged(0))]
    late = cut_off(without, averaged(3))
    train_cases(2, [*same, *moved, late], together=True)
    for case, start in zip(same, (1, 3), strict=True):
        assert_close(weights_of(case), weights_of(cases[start]), 0.0)
    for case, start in zip(moved, (0, 3), strict=True):
        assert_close(weights_of(case), weights_of(cases[start]), 1e-5)
    begins = [e["ema_begins"] for e in read_events(late.run.events) if e["event"] == "start"]
    assert begins == [False, True]
    first, last = (weights_of(late, step, MASTER) for step in (HALF, STEPS))
    expected = {name: 2 / 11 * first[name] + 9 / 11 * last[name] for name in first}
    assert_close(weights_of(late), expected, 1e-6)

    config, out = cases[3].plan.config, tmp_path / "out"
    export(config, path_of(cases[3]), out, dtype=torch.float32, weights=AVERAGE)
    exported, average = load_file(out / "model.safetensors"), weights_of(cases[3])
    assert_close({name: exported[name].flatten() for name in average}, average, 0.0)
    with pytest.raises(TrainctlError, match="no average of the weights") as refused:
        load(without.plan, path_of(without), "cpu", _unseen, weights=AVERAGE)
    assert refused.value.exit_code == ExitCode.run_state


@pytest.mark.slow
def test_a_skipped_update_does_not_count(tmp_path: Path) -> None:
    config = averaged(2)
    config.stability.on_bad_loss, config.training.ema_every_steps = OnBadLoss.skip_step, 1
    run = RunPaths(tmp_path)
    train_poisoned(Poisoned(tiny_plan(config, 2), run, poison=((4, NAN),)))  # in the second step
    case = Case(tiny_plan(config, 2), run)
    assert CheckpointReader(path_of(case)).manifest["ema"] == {"steps": STEPS - 1}
    assert_close(weights_of(case, 2), weights_of(case, 1), 0.0)


@pytest.mark.slow
def test_the_average_on_every_axis_and_in_host_memory(tmp_path: Path) -> None:
    whole = case_of(averaged(0), tmp_path / "whole")
    others = []
    for axis in ("tensor", "pipeline", "sequence"):
        config = averaged(0)
        setattr(config.parallelism, axis, 2)
        others.append(case_of(config, tmp_path / axis))
    for stage in (2, 3):
        config = averaged(0)
        config.zero_stage.stage = stage
        config.offload.optimizer = OffloadDevice.cpu
        others.append(case_of(config, tmp_path / f"host-{stage}"))
    train_cases(2, [whole, *others], together=True)
    for case in others:
        assert_close(weights_of(case), weights_of(whole), 1e-4)  # Adam, where gradients are nothing
        assert_evaluated(case)


def _unseen(what: str, done: int, total: int) -> None:
    """Nobody looks."""
