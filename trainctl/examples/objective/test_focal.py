"""Test of the objective: losses and measures of two tokens, and a gradient."""

from pathlib import Path

import pytest
import torch

from trainctl.config.registry import function_of, load_spec, new_section, trust_folder
from trainctl.train.objectives.base import SeenTokens

trust_folder(Path(__file__).parents[1] / "options")


def test_the_loss_of_two_tokens() -> None:
    probabilities = torch.tensor([[0.25, 0.75]], requires_grad=True)
    counted = torch.ones(1, 2, dtype=torch.bool)
    seen = SeenTokens(log_probabilities=probabilities.log(), is_counted=counted)
    section = new_section("objective", "focal", focus=1.0)
    losses, measures = function_of("objective", "focal")(section, seen)
    assert losses.tolist()[0] == pytest.approx([0.75 * 1.386294, 0.25 * 0.287682], rel=1e-4)
    assert set(measures) == set(load_spec("objective", "focal").measures)
    assert measures["sure"].tolist() == [[0.0, 1.0]]
    losses.sum().backward()
    assert (probabilities.grad < 0).all()
