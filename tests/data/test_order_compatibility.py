"""A run goes on with another plan only where that leaves what was drawn as it was."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder, incompatible_changes

SOURCES = [OrderedSource("a", 900), OrderedSource("b", 5000, 2)]
STAGES = [
    OrderedStage(0, 4, {"a": Fraction(1), "b": Fraction(3)}),
    OrderedStage(700, 8, {"b": Fraction(1)}),
]


def order(sources=SOURCES, stages=STAGES, seed=5, **others):
    return SampleOrder(seed, sources, stages, shard_tokens=64, **others)


LATER = OrderedStage(900, 8, {"c": Fraction(1), "a": Fraction(1)})
MORE = [OrderedSource("c", 700), *SOURCES]


@pytest.mark.parametrize(
    ("until", "now"),
    [
        (700, order(stages=STAGES[:1])),
        (800, order(MORE, [*STAGES, LATER])),
        (700, order(MORE, [STAGES[0], replace(LATER, first=700)])),
        (650, order(stages=[STAGES[0], replace(STAGES[1], first=660)])),
        (700, order(stages=[replace(STAGES[0], weights={"b": Fraction(6), "a": Fraction(2)})])),
        (0, order(seed=6)),
    ],
)
def test_samples_not_yet_drawn_may_change(until, now):
    assert not list(incompatible_changes(order(), now, until))


@pytest.mark.parametrize(
    ("now", "says"),
    [
        (order(seed=6), "the seed"),
        (order(shuffle=False), "data.shuffle"),
        (order(stages=STAGES[:1]), "1 stages would have begun by sample 800, and 2 have"),
        (order(stages=[*STAGES, replace(STAGES[0], first=790)]), "3 stages would have begun"),
        (order(stages=[STAGES[0], replace(STAGES[1], first=600)]), "begins at sample 600"),
        (order(stages=[STAGES[0], replace(STAGES[1], length=16)]), "samples of 16, and it was 8"),
        (
            order(stages=[replace(STAGES[0], weights={"a": Fraction(1)}), STAGES[1]]),
            "has the weights a 1, and it was a 1/4, b 3/4",
        ),
        (order([SOURCES[0], OrderedSource("b", 5001, 2)]), "b was drawn from, and is now another"),
        (order([SOURCES[0], OrderedSource("b", 5000)]), "or shuffled by other shards"),
    ],
)
def test_samples_already_drawn_may_not_change(now, says):
    found = list(incompatible_changes(order(), now, 800))
    assert len(found) == 1 and says in found[0]


@given(st.data())
def test_without_a_change_the_past_is_the_same(data):
    def some_order():
        weights = st.dictionaries(
            st.sampled_from("ab"), st.sampled_from([Fraction(1), Fraction(2)]), min_size=1
        )
        firsts = sorted(data.draw(st.sets(st.sampled_from([100, 200]), max_size=2)))
        lengths = st.sampled_from([4, 8])
        stages = [OrderedStage(f, data.draw(lengths), data.draw(weights)) for f in (0, *firsts)]
        sources = [OrderedSource(n, data.draw(st.sampled_from([300, 900]))) for n in "ab"]
        return order(sources, stages, seed=data.draw(st.sampled_from([1, 2])))

    before, now = some_order(), some_order()
    until = data.draw(st.sampled_from([0, 50, 100, 150, 250]))
    was, becomes = (each.at(np.arange(until)) for each in (before, now))
    same = all(
        (getattr(was, name) == getattr(becomes, name)).all()
        for name in ("stage", "source", "epoch", "index")
    )
    if not list(incompatible_changes(before, now, until)):
        assert same
