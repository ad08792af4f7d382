"""GPU tests of the budget against measured peaks of each part of a step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import trainctl

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

MODEL = (
    "model=llama-1b",
    "precision=bf16",
    "hardware.devices_per_node=1",
    "tokenizer=byte",
    "training.steps=10",
    "training.micro_batch_size=2",
    "data.max_bytes=2000000",
)


@pytest.mark.parametrize("sequence_length", [1024, 4096])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_measured_peaks_are_near_the_predicted(
    stage: int, checkpointing: str, sequence_length: int, tmp_path: Path
) -> None:
    choices = (
        f"zero_stage={stage}",
        f"activation_checkpointing={checkpointing}",
        f"training.sequence_length={sequence_length}",
    )
    said = trainctl("estimate-memory", *MODEL, *choices, "--measure", "--json", cwd=tmp_path)
    report, _ = json.JSONDecoder().raw_decode(said)  # talk comes after it
    parts = {row["part"]: row for row in report["phases"]}
    for part in ("forward", "backward", "optimizer"):
        row = parts[part]
        assert row["predicted_bytes"] == pytest.approx(row["measured_bytes"], rel=0.08), part
