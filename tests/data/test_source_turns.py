"""Shares hold at every prefix, not only in the end."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainctl.data.order import MOST_SLOTS, quotas_from_weights, schedule_of

quotas = st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(sum).map(tuple)


def assert_within_one(source, shares):
    """Exactly, in whole numbers: |drawn x Q - m x q| < Q at every prefix m."""
    total = sum(shares)
    drawn = (source[:, None] == np.arange(len(shares))).cumsum(0)
    wanted = np.arange(1, len(source) + 1)[:, None] * np.array(shares)
    assert np.abs(drawn * total - wanted).max() < total


@given(quotas)
def test_no_prefix_is_a_draw_off(shares):
    turns = schedule_of(shares)
    assert_within_one(np.tile(turns.source, 2), shares)


@given(quotas, st.data())
def test_ranks_count_and_positions_invert(shares, data):
    turns = schedule_of(shares)
    draws = data.draw(st.integers(0, 3 * turns.size))
    sources = np.resize(turns.source, draws)
    for source, quota in enumerate(shares):
        assert turns.draws_before(source, draws) == (sources == source).sum()
        positions = np.flatnonzero(sources == source)
        numbers = positions // turns.size * quota + turns.rank[positions % turns.size]
        assert numbers.tolist() == list(range(len(positions)))
        for number in numbers[-3:].tolist():
            assert turns.position(source, number) == positions[number]


@given(quotas, st.data())
def test_a_source_without_a_share_changes_no_turn(shares, data):
    at = data.draw(st.integers(0, len(shares)))
    more = schedule_of((*shares[:at], 0, *shares[at:]))
    known = np.delete(np.arange(len(shares) + 1), at)
    assert (more.source == known[schedule_of(shares).source]).all()


def test_small_shares_among_many_do_not_come_first():
    """Nested splits would draw all small shares first, and be 49 draws off."""
    shares = (*[1] * 99, 99)
    assert_within_one(schedule_of(shares).source, shares)


def test_decimal_weights_are_exact():
    decimal = [Fraction("0.7"), Fraction("0.1"), Fraction("0.2")]
    assert quotas_from_weights(decimal) == (7, 1, 2)
    assert quotas_from_weights([Fraction("0.333333"), Fraction("0.666667")]) == (333333, 666667)
    assert quotas_from_weights([Fraction(3), Fraction(1), Fraction(0)]) == (3, 1, 0)


@given(st.lists(st.fractions(0, 1), min_size=1, max_size=8).filter(sum))
def test_rounded_weights_are_near_and_none_is_lost(weights):
    found = quotas_from_weights(weights)
    shares = [weight / sum(weights) for weight in weights]
    assert sum(found) <= MOST_SLOTS
    for quota, share in zip(found, shares, strict=True):
        assert (quota > 0) == (share > 0)
        assert abs(Fraction(quota, sum(found)) - share) <= Fraction(len(weights), MOST_SLOTS)
