"""A training of transformers' Trainer or of FSDP2 goes on in trainctl, and from there in its tool.

With the tools themselves, on two processes.
"""

from math import prod

import pytest
import torch
from foreign_journeys import (
    LAYOUTS,
    config_of_run,
    continue_in_tools,
    continue_in_trainctl,
    train_in_tools,
)
from foreign_tools import FSDP_FORMS

from trainctl.migration.checkpoints.source import open_source
from trainctl.train.models.model import skeleton

LARGEST = 1e-5

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def trained(folder):
    return train_in_tools(folder, list(LAYOUTS))


@pytest.mark.timeout(900)
def test_a_training_goes_on_with_the_same_losses_there_and_back(folder, trained):
    there = continue_in_trainctl(folder, trained)
    assert max(there.values()) < LARGEST, there
    back = continue_in_tools(folder, trained)
    assert max(back.values()) < LARGEST, back


def states(path):
    """Return all states of a checkpoint, by parameter and name."""
    source = open_source(path)
    source.use_model(skeleton(config_of_run().model, torch.float32))
    found = {
        (name, state): source.read(name, state, 0, prod(shape))
        for name, shape in source.shapes.items()
        for state in source.states
    }
    source.verify()
    return found


@pytest.mark.parametrize("form", FSDP_FORMS)
def test_what_accelerate_saves_of_fsdp_is_the_same(folder, trained, form):
    expected, found = states(folder / "fsdp2" / "out"), states(folder / "fsdp2" / form)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], values) for key, values in expected.items())


@pytest.mark.parametrize("tool", [tool for tool in LAYOUTS if not tool.startswith("fsdp2")])
def test_progress_is_that_of_the_trainer(folder, trained, tool):
    source = open_source(folder / tool / "out")
    known = source.progress
    assert (source.format, known.step, known.samples) == ("trainer", 3, 24)
    assert (known.tokens, known.learning_rate) == (24 * 33, 1e-3)
    assert source.scalars == {"step": 3.0}
    assert source.hyperparameters["weight_decay"] == 0.1
