"""Tests of the compact table of a model's tensors, in both directions."""

from __future__ import annotations

import pytest

from trainctl.errors import TrainctlError
from trainctl.models.tensors import from_table, to_table

TENSORS = [
    ("model.embed_tokens.weight", "10x4 embedding"),
    ("model.layers.0.mlp.up_proj.weight", "8x4"),
    ("model.layers.0.norm.weight", "4"),
    *(
        (f"model.layers.{layer}.{name}", said)
        for layer in range(1, 5)
        for name, said in (
            *((f"mlp.experts.{expert}.up_proj.weight", "3x4") for expert in range(12)),
            ("norm.weight", "4"),
            ("scale", "scalar"),
        )
    ),
    ("model.norm.weight", "4"),
    ("lm_head.weight", "10x4"),
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


@pytest.mark.parametrize("entry", ["a", "a ", " a", "a.{0-999999999}.b 3"])
def test_invalid_entries_are_refused_at_once(entry: str) -> None:
    with pytest.raises(TrainctlError, match=r"model\.anatomy"):
        from_table([entry])
