"""A launch on a GPU: utilisation, device times, memory within the plan's range, a profile."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from commands import events, trainctl

SMALL = (
    "model=gpt2-124m",
    "precision=bf16",
    "hardware.devices_per_node=1",
    "training.steps=8",
    "training.sequence_length=1024",
    "training.micro_batch_size=4",
    "training.gradient_accumulation_steps=2",
    "training.evaluation_samples=8",
    "data.max_bytes=4000000",
    "checkpoint.at_end=false",
)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "layout",
    [("zero_stage=1",), ("zero_stage=3", "activation_checkpointing=full")],
    ids=["zero1", "zero3-checkpointing"],
)
def test_a_launch_on_a_gpu_records_what_a_cpu_cannot(
    tmp_path: Path, layout: tuple[str, ...]
) -> None:
    window = "logging.profile_steps=[6,7]"
    trainctl("launch", *SMALL, *layout, window, "--run-dir", "run", cwd=tmp_path)
    run = tmp_path / "run"
    steps = events(run, "step")
    assert steps[-1]["loss"] < steps[0]["loss"]
    for step in steps[2:]:
        assert 0 < step["mfu"] < 1
        assert {"forward", "backward", "optimizer"} <= set(step["seconds"])
        assert step["peak_bytes"]["allocated"] > 0
    (last,) = [event for event in events(run, "memory") if event["at_end"]]
    measured, planned = last["measured"], last["planned"]
    assert 0 < measured["allocated_peak_bytes"] < measured["device_peak_bytes"]
    assert measured["device_peak_bytes"] <= planned["device_peak_high_bytes"]
    with gzip.open(run / "attempts/1/profile/rank-0.trace.json.gz", "rt") as stream:
        assert '"cat": "kernel"' in stream.read()
