"""Test of the optimizer: it lowers a loss, and keeps the states that its spec names."""

from pathlib import Path
from types import SimpleNamespace

import torch

from trainctl.config.registry import function_of, load_spec, new_section, trust_folder

trust_folder(Path(__file__).parents[1] / "options")


def test_it_lowers_a_loss() -> None:
    section = new_section("optimizer", "signum", lr=0.05)
    plan = SimpleNamespace(config=SimpleNamespace(optimizer=section))
    weight = torch.nn.Parameter(torch.ones(8))
    groups = [{"params": [weight], "lr": section.lr, "weight_decay": 0.0}]
    optimizer = function_of("optimizer", "signum")(plan, groups)
    losses = []
    for _ in range(15):
        loss = weight.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    states = {name for name, value in optimizer.state[weight].items() if value.shape == (8,)}
    assert states == set(load_spec("optimizer", "signum").states)
