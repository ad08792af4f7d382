"""The z-loss, in every way that a loss is computed, against plain torch."""

import pytest
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases

from trainctl.config.registry import new_section
from trainctl.config.schema import CrossEntropyKind, DataType
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

STEPS, WEIGHT = 3, 0.02


def config_of(z_loss=WEIGHT, kind=CrossEntropyKind.plain, **axes):
    config = tiny_config(steps=STEPS, evaluation_samples=8)
    config.precision.compute = DataType.fp32
    config.optimizer.lr = 1e-3
    config.schedule = new_section("schedule", "constant", warmup_steps=0)
    config.checkpoint.at_end = False
    config.stability.z_loss = z_loss
    config.kernels.cross_entropy = kind
    if kind is CrossEntropyKind.chunked:
        config.kernels.chunk_tokens = 100  # the last chunk is shorter
    for axis, size in axes.items():
        setattr(config.parallelism, axis, size)
    return config


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return plain_torch(config_of(), tmp_path_factory.mktemp("plain") / "run", steps=STEPS)


@pytest.mark.parametrize(
    ("world_size", "changes"),
    [
        (2, {}),
        (2, {"kind": CrossEntropyKind.chunked, "tensor": 2}),
        (1, {"kind": CrossEntropyKind.chunked}),
        (2, {"tensor": 2}),
        (2, {"sequence": 2}),
        (2, {"pipeline": 2}),
    ],
    ids=["data", "chunked-tensor", "chunked", "tensor", "sequence", "pipeline"],
)
def test_every_path_of_the_loss(tmp_path, reference, world_size, changes):
    run = RunPaths(tmp_path)
    train_cases(world_size, [Case(tiny_plan(config_of(**changes), world_size), run)])
    steps = [event for event in read_events(run.events) if event["event"] == "step"]
    assert [event["z_loss"] for event in steps] == pytest.approx(reference.z_losses, rel=1e-5)
    for step, (loss, norm) in curve(run).items():
        assert (loss, norm) == pytest.approx(reference.curve[step], rel=2e-5)
    # An evaluation is of the cross entropy alone: the z-loss is six tenths of a nat here.
    (held_out,) = [event for event in read_events(run.events) if event["event"] == "evaluation"]
    assert abs(held_out["loss"] - steps[-1]["loss"]) < 0.3 < reference.z_losses[0]


def test_it_changes_the_curve_and_without_it_nothing_is_recorded(tmp_path, reference):
    plain = plain_torch(config_of(z_loss=0.0), tmp_path / "plain", steps=STEPS)
    assert abs(plain.curve[STEPS][0] - reference.curve[STEPS][0]) > 1e-3
    run = RunPaths(tmp_path / "run")
    train_cases(1, [Case(tiny_plan(config_of(z_loss=0.0), 1), run)])
    assert all("z_loss" not in event for event in read_events(run.events))
    for step, (loss, norm) in curve(run).items():
        assert (loss, norm) == pytest.approx(plain.curve[step], rel=2e-5)
