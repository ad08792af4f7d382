"""Whole runs by the real command: train, stop, resume, and what is left in the run directory."""

import json

import pytest
from commands import TINY, curve, events, trainctl

from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths

pytestmark = pytest.mark.usefixtures("preloaded")


def test_a_run_leaves_its_records(tmp_path):
    run = tmp_path / "run"
    said = trainctl(
        "launch", *TINY, "training.steps=3", "training.sample_tokens=5", "--run-dir", "run",
        cwd=tmp_path,
    )  # fmt: skip
    steps = events(run, "step")
    assert [event["step"] for event in steps] == [1, 2, 3]
    for event in steps:
        assert event["schema"] == 1 and event["attempt"] == 1
        assert event["tokens"] == event["step"] * 8 * 64
        assert event["samples"] == [(event["step"] - 1) * 8, event["step"] * 8]
        assert event["tokens_per_second"] > 0 and event["learning_rate"] > 0
    (evaluation,) = events(run, "evaluation")
    assert evaluation["step"] == 3 and f"{evaluation['loss']:.4f}" in said
    (checkpoint,) = events(run, "checkpoint")
    assert (run / checkpoint["path"] / "manifest.json").is_file()
    assert events(run, "end")[0]["reason"] == "complete"
    (sample,) = events(run, "sample")
    assert sample["text"].startswith("def ")
    paths = RunPaths(run)
    attempt = paths.attempt(1)
    for file in (paths.config, paths.record, paths.status, attempt.plan, attempt.deepspeed,
                 attempt.command, attempt.rank_log(0), attempt.rank_log(1)):  # fmt: skip
        assert file.is_file(), file
    assert json.loads(paths.status.read_text())["state"] == "finished"
    assert str(run) in said


@pytest.mark.slow
def test_resume_auto_starts_and_then_goes_on(tmp_path):
    """`tests/faults` and `tests/train/test_resume.py` compare the curve with an uninterrupted
    run's.
    """
    one = (*TINY, "hardware.devices_per_node=1", "training.steps=4")
    config = (*one, "--run-dir", "run", "--resume", "auto")
    trainctl("launch", *config, "training.stop_after_steps=2", cwd=tmp_path)
    said = trainctl("launch", *config, cwd=tmp_path)
    assert "step-00000002" in said and "training.stop_after_steps" in said
    assert list(curve(tmp_path / "run")) == [1, 2, 3, 4]
    assert [event["attempt"] for event in events(tmp_path / "run", "step")] == [1, 1, 2, 2]
    assert [info.step for info in list_checkpoints(RunPaths(tmp_path / "run"))] == [2, 4]


def test_text_too_short_for_a_sample_is_found_before_there_is_a_run(tmp_path):
    (tmp_path / "short.txt").write_text("too short")
    said = trainctl(
        "launch", *TINY, "data=files", f"data.paths=[{tmp_path}/short.txt]", "--run-dir", "short",
        cwd=tmp_path, code=2,
    )  # fmt: skip
    assert "less than one sample" in said
    assert not (tmp_path / "short").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # DeepSpeed compiles what offload needs when it is first used
def test_the_recipe_for_nvme_trains_when_shrunk(tmp_path):
    """The other recipes are trained in `tests/recipes/test_recipes_train.py`."""
    trainctl(
        "launch", "recipe=7b-zero3-nvme", "model=tiny-llama", "launcher=local", "hardware=1xcpu",
        f"offload.nvme_path={tmp_path}", "training.steps=3", "training.tokens=null",
        "training.sequence_length=32", "training.global_batch_size=2",  # bf16: few tokens
        "training.micro_batch_size=1", "training.gradient_accumulation_steps=null",
        "training.evaluation_samples=4",
        "schedule.warmup_steps=1", "data=stdlib", "data.max_bytes=1000000", "tokenizer=byte",
        "--run-dir", "run", "--force",
        cwd=tmp_path,
    )  # fmt: skip
    assert list(curve(tmp_path / "run")) == [1, 2, 3]
