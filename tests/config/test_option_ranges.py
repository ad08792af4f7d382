"""Ranges of a key that several kinds of an option share."""

from __future__ import annotations

import pytest

from trainctl.config.compose import compose
from trainctl.errors import TrainctlError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=simpo"], ""),
        (["objective=simpo", "objective.beta=0"], "0.0 must be above 0"),
        (["objective=distill", "objective.beta=2"], "2.0 is above the largest legal value"),
        (["objective.beta=2", "objective=distill"], "2.0 is above the largest legal value"),
    ],
)
def test_the_range_of_a_shared_key_is_the_chosen_kinds(overrides, message):
    if not message:
        assert not [each for each in compose(overrides).findings if each.is_error]
        return
    with pytest.raises(TrainctlError) as refused:
        compose(overrides)
    assert [(each.key, each.message) for each in refused.value.findings if each.is_error] == [
        ("objective.beta", message)
    ]
