"""A run that was interrupted and resumed has the curve of one that was not, bit for bit."""

import pytest
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.schema import DataType
from trainctl.runs.checkpoints import list_checkpoints, newest_checkpoint
from trainctl.runs.layout import RunPaths

STEPS, HALF = 12, 6


def plan(stage, compute, world_size=2):
    config = tiny_config(steps=STEPS, evaluate_every_steps=4)
    config.zero_stage.stage = stage
    config.precision.compute = compute
    config.checkpoint.keep = 2
    return tiny_plan(config, world_size)


@pytest.mark.parametrize("compute", [DataType.fp32, DataType.bf16])
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


def test_resume_on_another_layout_goes_on_with_the_same_curve(tmp_path):
    """The saved state knows nothing of the layout: 2 ranks at stage 1 become 1 rank at stage 3."""
    run, undisturbed = RunPaths(tmp_path / "moved"), RunPaths(tmp_path / "undisturbed")
    first = plan(1, DataType.fp32)
    train_cases(2, [Case(first, undisturbed), Case(with_stop(first, HALF), run)])
    train_cases(1, [Case(plan(3, DataType.fp32, world_size=1), run, attempt=2)])
    expected, found = curve(undisturbed), curve(run)
    assert list(found) == list(range(1, STEPS + 1))
    for step, (loss, norm) in expected.items():
        assert found[step] == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-5)), step


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path):
    run = RunPaths(tmp_path)
    whole = plan(2, DataType.fp32)
    train_cases(2, [Case(with_stop(whole, 4), run)])
    train_cases(2, [Case(with_stop(whole, 8), run, attempt=2)])
    (run.checkpoints / "step-00000008" / "rank-00001.safetensors").write_bytes(b"cut")
    before = curve(run)
    train_cases(2, [Case(with_stop(whole, 8), run, attempt=3)])
    assert curve(run) == before
    newest, passed_over = newest_checkpoint(run)
    assert newest is not None and newest.step == 8 and passed_over == []
