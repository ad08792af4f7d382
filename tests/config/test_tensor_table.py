"""A model's tensors as a short list, and back."""

from __future__ import annotations

import pytest

from trainctl.config.tensor_table import from_table, to_table
from trainctl.errors import TrainctlError

TENSORS = [
    ("model.embed_tokens.weight", (10, 4)),
    ("model.layers.0.mlp.up_proj.weight", (8, 4)),
    ("model.layers.0.norm.weight", (4,)),
    *(
        (f"model.layers.{layer}.{name}", shape)
        for layer in range(1, 5)
        for name, shape in (
            *((f"mlp.experts.{expert}.up_proj.weight", (3, 4)) for expert in range(12)),
            ("norm.weight", (4,)),
            ("scale", ()),
        )
    ),
    ("model.norm.weight", (4,)),
    ("lm_head.weight", (10, 4)),
]


def test_a_table_is_short_and_says_the_same() -> None:
    table = to_table(TENSORS)
    assert "model.layers.{1-4}.mlp.experts.{0-11}.up_proj.weight 3x4" in table
    assert len(table) == 7
    found = from_table(table)
    assert sorted(found) == sorted(TENSORS)
    assert found[0] == TENSORS[0] and found[-2:] == tuple(TENSORS[-2:])
    layers = [name.split(".")[2] for name, _ in found if ".layers." in name]
    assert layers == sorted(layers)


@pytest.mark.parametrize("entry", ["a", "a 3,4", "a.{0-999999999}.b 3", "a 3 x 4"])
def test_what_is_no_entry_is_refused_at_once(entry: str) -> None:
    with pytest.raises(TrainctlError, match=r"model\.tensors"):
        from_table([entry])
