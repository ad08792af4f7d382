"""GPU test that docs.pytorch.org/memory_viz can read the memory snapshot of a real run."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from commands import events, trainctl

SMALL = (
    "model=tiny-llama",
    "hardware.devices_per_node=1",
    "training.steps=4",
    "training.sequence_length=256",
    "training.micro_batch_size=4",
    "data.max_bytes=2000000",
)


@pytest.mark.gpu
def test_the_history_of_the_step_reaches_its_peak(tmp_path: Path) -> None:
    trainctl("launch", *SMALL, "callbacks=[memory_snapshot]", "--run-dir", "run", cwd=tmp_path)
    records = [e for e in events(tmp_path / "run", "callback") if e["name"] == "snapshot"]
    told = records[-1]["values"]
    found = pickle.loads((tmp_path / "run" / told["path"]).read_bytes())
    held = sum(
        block["size"]
        for segment in found["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    # Backwards from what is held at the end, through the step.
    peak = held
    for entry in reversed(found["device_traces"][0]):
        if entry["action"] == "alloc":
            held -= entry["size"]
        elif entry["action"] == "free_completed":
            held += entry["size"]
        peak = max(peak, held)
    # The record's peak is since the start, which a step of a small model may not reach.
    assert 0.5 < peak / told["allocated_peak_bytes"] < 1.02
    assert any(entry.get("frames") for entry in found["device_traces"][0])
