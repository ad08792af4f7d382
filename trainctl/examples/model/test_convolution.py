"""Test of the model: the shape of its logits, and that a token sees none after it."""

import importlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
own = importlib.import_module("convolution")


def test_a_token_sees_none_after_it() -> None:
    torch.manual_seed(0)
    model = own.model(own.ConvolutionSizes(width=16))
    ids = torch.randint(264, (2, 12))
    changed = torch.cat((ids[:, :6], (ids[:, 6:] + 1) % 264), dim=1)
    positions = torch.arange(12).expand(2, 12)
    logits, others = model(ids, positions), model(changed, positions)
    assert logits.shape == (2, 12, 264)
    assert torch.equal(logits[:, :6], others[:, :6])
    assert not torch.equal(logits[:, 6:], others[:, 6:])
