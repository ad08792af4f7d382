"""Test of the callback: what it records of two ranks' gradients."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trainctl.config.registry import function_of, load_spec, trust_folder

trust_folder(Path(__file__).parents[1] / "options")


def test_it_records_the_norm_of_each_parameter() -> None:
    recorded: list[dict[str, Any]] = []
    parts = [
        SimpleNamespace(name="weight", values=torch.tensor([3.0, 4.0]), is_counted=True),
        SimpleNamespace(name="bias", values=torch.tensor([9.0]), is_counted=False),
    ]
    context = SimpleNamespace(
        shapes={"weight": (2,), "bias": (1,)},
        gradients=lambda: iter(parts),
        collectives=SimpleNamespace(sum=lambda *values: [2 * value for value in values]),
        record=lambda name, **values: recorded.append(values),
    )
    keys = load_spec("callbacks", "per_parameter").keys(every_steps=2)
    callback = function_of("callbacks", "per_parameter")(keys)
    for context.step in (1, 2):
        callback.after_backward(context)
    assert recorded == [{"weight": 50**0.5, "bias": 0.0}]
