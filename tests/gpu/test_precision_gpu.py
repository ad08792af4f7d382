"""Number formats that only a GPU computes in, by the real command on one device."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import events, trainctl

SMALL = (
    "model=tiny-llama",
    "hardware.devices_per_node=1",
    "training.steps=20",
    "training.sequence_length=256",
    "training.global_batch_size=8",
    "training.gradient_accumulation_steps=2",
    "training.evaluation_samples=8",
    "optimizer.lr=1e-3",
    "data.max_bytes=2000000",
)


def train(folder: Path, name: str, *overrides: str) -> list[dict[str, object]]:
    """Launch a run and return its step records."""
    trainctl("launch", *SMALL, *overrides, "--run-dir", name, cwd=folder)
    return events(folder / name, "step")


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_learns_and_resumes_with_its_scale(tmp_path: Path, stage: int) -> None:
    options = (f"zero_stage={stage}", "precision=fp16", "precision.initial_scale_power=24")
    whole = train(tmp_path, "whole", *options)
    skipped = [step["step"] for step in whole if step.get("skipped")]
    assert skipped == list(range(1, len(skipped) + 1)) and 1 < len(skipped) < 15
    assert whole[-1]["loss"] < whole[0]["loss"] - 0.1
    train(tmp_path, "parts", *options, "training.stop_after_steps=10")
    trainctl("resume", "parts", "training.stop_after_steps=null", cwd=tmp_path)
    parts = events(tmp_path / "parts", "step")
    assert [step["loss_scale"] for step in parts] == [step["loss_scale"] for step in whole]
    for one, other in zip(whole, parts, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "precision",
    [
        ("precision=fp8",),
        ("precision=autocast-bf16",),
        ("precision=bf16-low-memory",),
        ("precision=bf16", "precision.gradient_accumulation=fp32"),
    ],
    ids=["fp8", "autocast", "low-memory", "fp32-accumulation"],
)
def test_a_format_follows_the_curve_of_fp32(tmp_path: Path, precision: tuple[str, ...]) -> None:
    reference = train(tmp_path, "fp32", "precision=fp32")
    other = train(tmp_path, "other", *precision)
    for one, two in zip(reference, other, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=0.05)
    assert other[-1]["loss"] < other[0]["loss"] - 0.3
