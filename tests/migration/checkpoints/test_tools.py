"""A training of transformers' Trainer or of FSDP2 goes on in trainctl, and from there in its tool.

With the tools themselves, on two processes.
"""

import pytest
from foreign_journeys import LAYOUTS, continue_in_tools, continue_in_trainctl, train_in_tools

LARGEST = 1e-5


@pytest.mark.slow
def test_a_training_goes_on_with_the_same_losses_there_and_back(tmp_path):
    expected = train_in_tools(tmp_path, list(LAYOUTS))
    there = continue_in_trainctl(tmp_path, expected)
    print(there)
    assert max(there.values()) < LARGEST, there
    back = continue_in_tools(tmp_path, expected)
    print(back)
    assert max(back.values()) < LARGEST, back
