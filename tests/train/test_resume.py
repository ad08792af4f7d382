"""A run that was interrupted and resumed has the curve of one that was not, bit for bit."""

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import DataType
from trainctl.runs.checkpoints import list_checkpoints, newest_checkpoint
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

STEPS, HALF = 4, 2


def plan(stage, compute, steps=STEPS):
    config = tiny_config(steps=steps, evaluate_every_steps=HALF, sequence_length=32)
    config.zero_stage.stage = stage
    config.precision.compute = compute
    config.optimizer.lr = 1e-3
    config.checkpoint.keep = 2
    config.checkpoint.asynchronous = compute is DataType.bf16
    return tiny_plan(config, 2)


@pytest.mark.parametrize(
    "compute", [DataType.fp32, pytest.param(DataType.bf16, marks=pytest.mark.slow)]
)
def test_resume_on_the_same_layout_is_exact(tmp_path, compute):
    plans = {stage: plan(stage, compute) for stage in range(4)}
    whole = {stage: RunPaths(tmp_path / f"whole-{stage}") for stage in plans}
    parts = {stage: RunPaths(tmp_path / f"parts-{stage}") for stage in plans}
    train_cases(2, [Case(plans[stage], whole[stage]) for stage in plans])
    train_cases(2, [Case(with_stop(plans[stage], HALF), parts[stage]) for stage in plans])
    train_cases(2, [Case(plans[stage], parts[stage], attempt=2) for stage in plans])
    for stage in plans:
        assert len(curve(whole[stage])) == STEPS
        assert curve(parts[stage]) == curve(whole[stage]), f"ZeRO {stage}"
        assert [info.step for info in list_checkpoints(parts[stage])] == [HALF, STEPS]
        for event in read_events(parts[stage].events):
            if event["event"] == "checkpoint":
                behind = event["stall_seconds"] < event["seconds"]
                assert behind == (compute is DataType.bf16)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    """One byte is flipped. The steps since the previous checkpoint are repeated, with the same
    losses.
    """
    run, other = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "other")
    whole = plan(2, DataType.fp32, steps=6)
    train_cases(2, [Case(with_stop(whole, 2), run)])
    train_cases(2, [Case(whole, run, attempt=2)])
    file = run.checkpoints / "step-00000006" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = curve(run)
    train_cases(2, [Case(whole, run, attempt=3), Case(started_from(run.root), other)])
    assert curve(run) == before
    newest, passed_over = newest_checkpoint(run)
    assert newest is not None and newest.step == 6 and passed_over == []
    replayed = [event for event in read_events(run.events) if event["event"] == "replay"]
    assert [event["step"] for event in replayed] == [3, 4]
    assert all(event["loss"] == event["expected"] for event in replayed)
    # A new run from the weights of this one begins where it is, with its own steps and data.
    assert list(curve(other)) == [1, 2] and curve(other)[1][0] < curve(run)[1][0] - 0.2


def started_from(weights):
    """Plan a new run of two steps from the weights of another run."""
    config = tiny_config(steps=2, sequence_length=32)
    config.zero_stage.stage = 1
    config.precision.compute = DataType.fp32
    config.model.initial_weights = str(weights)
    config.checkpoint.at_end = False
    return tiny_plan(config, 2)
