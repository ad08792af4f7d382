"""A run goes on with the same curve, samples and weights where the model is cut otherwise.

Tensor shards, pipeline stages, sequence parts and all of them together, there and back; what is
exported from each is the same model.
"""

from pathlib import Path

import pytest
import torch
from elsewhere import (
    CUTS,
    OVERSHOOT,
    REFERENCE,
    Leg,
    largest_difference,
    replayed_steps,
    sees_every_sample_once,
    travel,
)
from transformers import AutoModelForCausalLM

from trainctl.runs import checkpoints
from trainctl.runs.records import read_events
from trainctl.train.export.directory import export


def exported_logits(run, plan, folder: Path) -> torch.Tensor:
    """Export the run's newest checkpoint to `folder` and return the exported model's logits."""
    newest = checkpoints.list_checkpoints(run)[-1]
    export(plan.config, newest.path, folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return model(torch.arange(96).view(2, 48) % 256).logits


def assert_same_run(runs, journey, tmp_path):
    run, reference = runs[journey], runs[REFERENCE]
    plan = journey[-1].plan()
    assert largest_difference(run, reference) < 1e-5, journey
    assert sees_every_sample_once(run, plan), journey
    assert replayed_steps(run) == OVERSHOOT * (len(journey) - 1), journey
    ours = exported_logits(run, plan, tmp_path / f"export-{journey[-1].name}-{len(journey)}")
    theirs = exported_logits(reference, plan, tmp_path / f"reference-{journey[-1].name}")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_from_heads_on_several_ranks_to_shard_groups(tmp_path):
    """Four tensor ranks have two key-value heads, and then two groups each all shards."""
    journey = (Leg(4, 2, tensor=4), Leg(4, 3, shard_group=2))
    runs = travel(tmp_path, [journey])
    assert_same_run(runs, journey, tmp_path)
    held_out = [
        [event["loss"] for event in read_events(run.events) if event["event"] == "evaluation"]
        for run in (runs[journey], runs[REFERENCE])
    ]
    assert held_out[0][-1] == pytest.approx(held_out[1][-1], abs=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_there_and_back(tmp_path):
    runs = travel(tmp_path, CUTS)
    for journey in CUTS:
        assert_same_run(runs, journey, tmp_path)
