"""Offload and quantised communication that only a GPU has, by the real command on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import events, trainctl
from test_precision_gpu import train

UNSAVED = ("checkpoint.at_end=false", "checkpoint.every_minutes=null")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        ("offload=cpu",),
        ("offload=cpu-all",),
        ("offload=cpu-partial", "zero_stage.sub_group_size=100000"),
        ("offload=cpu", "offload.super_offload=true", *UNSAVED),
    ],
    ids=["cpu", "cpu-all", "partial", "super-offload"],
)
def test_offload_follows_the_curve_without(tmp_path: Path, options: tuple[str, ...]) -> None:
    reference = train(tmp_path, "plain", "zero_stage=3", "precision=bf16")
    other = train(tmp_path, "offloaded", "zero_stage=3", "precision=bf16", *options)
    for one, two in zip(reference, other, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=0.02)
    assert other[-1]["loss"] < other[0]["loss"] - 0.3


@pytest.mark.gpu
def test_a_partly_offloaded_run_resumes(tmp_path: Path) -> None:
    options = ("zero_stage=3", "offload=cpu-partial", "zero_stage.sub_group_size=100000")
    whole = train(tmp_path, "whole", *options)
    train(tmp_path, "parts", *options, "training.stop_after_steps=10")
    trainctl("resume", "parts", "training.stop_after_steps=null", cwd=tmp_path)
    for one, two in zip(whole, events(tmp_path / "parts", "step"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["quantized_weights", "quantized_gradients"])
def test_quantised_communication_learns(tmp_path: Path, name: str) -> None:
    steps = train(tmp_path, "run", "zero_stage=3", f"zero_stage.{name}=true")
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2])
def test_zenflow_learns_and_resumes_with_its_weights(tmp_path: Path, stage: int) -> None:
    options = (
        f"zero_stage={stage}",
        "offload=cpu",
        "offload.zenflow=true",
        "offload.zenflow_select_interval=8",
        "optimizer.gradient_clipping=0",
        "training.gradient_accumulation_steps=1",
    )
    # With an update at each step it is AdamW, in bf16 where the columns are updated.
    reference = train(tmp_path, "plain", *options[:2], *options[4:])
    each = train(tmp_path, "each", *options, "offload.zenflow_update_interval=1")
    for one, two in zip(reference[:7], each, strict=False):
        assert two["loss"] == pytest.approx(one["loss"], abs=0.05)
    interval = "offload.zenflow_update_interval=4"
    whole = train(tmp_path, "whole", *options, interval)
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.3
    train(tmp_path, "parts", *options, interval, "training.stop_after_steps=10")
    trainctl("resume", "parts", "training.stop_after_steps=null", cwd=tmp_path)
    parts = events(tmp_path / "parts", "step")
    assert parts[10]["loss"] == pytest.approx(whole[10]["loss"], rel=1e-3)
    assert parts[-1]["loss"] < whole[0]["loss"] - 0.3
