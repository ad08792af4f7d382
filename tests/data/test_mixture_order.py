"""The order of a mixture: its properties, on plans drawn at random."""

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_order import sample_indices

from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder
from trainctl.plans.mixture import SINGLE_SOURCE, samples_in

SHARD = 64
MOST = 500
"""Samples of the longest stage."""


@st.composite
def plans(draw, lengths=(4,), windows=(None, 1, 3), stages=3):
    """Arguments of an order of some sources and stages, and samples to look at."""
    names = draw(st.lists(st.text("abcxyz", min_size=1, max_size=3), min_size=1, unique=True))[:5]
    sources = [
        OrderedSource(name, draw(st.integers(33, 900)), draw(st.sampled_from(windows)))
        for name in names
    ]
    found, first = [], 0
    for _ in range(draw(st.integers(1, stages))):
        parts = draw(st.lists(st.integers(0, 9), min_size=len(names), max_size=len(names)))
        parts[draw(st.integers(0, len(names) - 1))] += 1
        weights = {n: Fraction(p, 10) for n, p in zip(names, parts, strict=True) if p}
        found.append(OrderedStage(first, draw(st.sampled_from(lengths)), weights))
        first += draw(st.integers(1, MOST))
    return draw(st.integers(0, 2**40)), sources, found, first


def sample_order(plan, **others):
    seed, sources, stages, _ = plan
    return SampleOrder(seed, sources, stages, shard_tokens=SHARD, **others)


@pytest.mark.parametrize("shuffle", [True, False])
@given(tokens=st.integers(9, 5000), seed=st.integers(0, 2**40), start=st.integers(0, 10**13))
def test_one_source_without_stages_keeps_the_order_of_runs_that_were_begun(
    shuffle, tokens, seed, start
):
    stages = [OrderedStage(0, 8, {SINGLE_SOURCE: Fraction(1)})]
    order = SampleOrder(seed, [OrderedSource(SINGLE_SOURCE, tokens)], stages, shuffle=shuffle)
    samples = samples_in(tokens, 8)
    for counters in (np.arange(2 * samples + 3), start + np.arange(40).reshape(5, 8)):
        found = order.at(counters)
        before = sample_indices(counters, num_samples=samples, seed=seed, shuffle=shuffle)
        assert (found.index == before).all()
        assert (found.epoch == counters // samples).all()
        assert not found.source.any()
    assert order.order_over_ranks(start, 12).tolist() == list(range(start, start + 12))


@given(plans())
def test_each_sample_comes_once_in_an_epoch(plan):
    order = sample_order(plan)
    found = order.at(np.arange(plan[-1]))
    for number, source in enumerate(order.sources):
        mine, samples = found.source == number, samples_in(source.tokens, 4)
        epochs = found.epoch[mine]
        assert (epochs == np.arange(len(epochs)) // samples).all()
        for epoch in range(len(epochs) // samples + 1):
            indices = found.index[mine][epochs == epoch]
            assert len(set(indices.tolist())) == len(indices)
            assert ((indices >= 0) & (indices < samples)).all()


@given(plans(lengths=(4, 8, 12, 16, 32), windows=(None,)))
def test_no_token_comes_twice_in_an_epoch_when_the_length_changes(plan):
    assert_no_token_twice(plan)


@given(plans(lengths=(4, 8, 16, 32)))
def test_nor_with_windows(plan):
    assert_no_token_twice(plan)


@given(plans(lengths=(4, 8, 12, 16, 32), windows=(None,)))
def test_nor_in_the_order_of_the_text_which_goes_on_where_it_is(plan):
    assert_no_token_twice(plan, shuffle=False)
    order = sample_order(plan, shuffle=False)
    found = order.at(np.arange(plan[-1]))
    begin = found.index * np.array([stage.length for stage in order.stages])[found.stage]
    end = begin + np.array([stage.length for stage in order.stages])[found.stage]
    # Each stage begins at a multiple of its length, also of a source that it does not draw.
    longest_gap = sum(stage.length - 1 for stage in order.stages[1:])
    for number in range(len(order.names)):
        mine = np.flatnonzero(found.source == number)
        gaps = (begin[mine][1:] - end[mine][:-1])[np.diff(found.epoch[mine]) == 0]
        assert ((gaps >= 0) & (gaps <= longest_gap)).all()


def assert_no_token_twice(plan, **others):
    order = sample_order(plan, **others)
    found = order.at(np.arange(plan[-1]))
    for number, source in enumerate(order.sources):
        mine = np.flatnonzero(found.source == number)
        assert (np.diff(found.epoch[mine]) >= 0).all()
        for epoch in np.unique(found.epoch[mine]):
            used = np.zeros(source.tokens, dtype=np.int64)
            for at in mine[found.epoch[mine] == epoch]:
                length = order.stages[found.stage[at]].length
                begin = found.index[at] * length
                assert begin + length < source.tokens  # there is a label for the last
                used[begin : begin + length] += 1
            assert used.max(initial=0) <= 1


@given(plans(lengths=(32, 16, 8, 4), stages=1), st.sampled_from([1, 2, 4]))
def test_a_shorter_length_that_divides_leaves_nothing_out(plan, ratio):
    seed, sources, (first, *_), count = plan
    halved = OrderedStage(count // 2, max(4, first.length // ratio), first.weights)
    stages = [first, halved]
    order = SampleOrder(seed, sources, stages, shard_tokens=SHARD)
    assert not any(order.skipped_tokens().values())
    found = order.at(np.arange(count + 4000))
    lengths = np.array([stage.length for stage in stages])[found.stage]
    for number, source in enumerate(order.sources):
        mine = found.source == number
        seen_in = np.bincount(found.epoch[mine], lengths[mine])
        for seen in seen_in[:-1]:
            assert seen >= samples_in(source.tokens, first.length) * first.length


def test_a_longer_length_goes_on_with_the_next_window_and_says_what_it_left_out():
    stages = [OrderedStage(0, 4, {"a": Fraction(1)}), OrderedStage(40, 8, {"a": Fraction(1)})]
    for window, left in ((1, (48 - 40) * 4), (None, (799 - 40) * 4)):
        order = SampleOrder(1, [OrderedSource("a", 3200, window)], stages, shard_tokens=SHARD)
        assert order.skipped_tokens() == {"a": left}
        assert order.at([39, 40]).epoch.tolist() == [0, 0 if window else 1]


@given(plans(lengths=(4, 8)))
def test_shares_hold_at_every_prefix_of_every_stage(plan):
    order = sample_order(plan)
    source = order.at(np.arange(plan[-1])).source
    ends = [*(stage.first for stage in order.stages[1:]), plan[-1]]
    for stage, end in zip(order.stages, ends, strict=True):
        drawn = (source[stage.first : end, None] == np.arange(len(order.names))).cumsum(0)
        total = sum(stage.weights.values())
        for number, name in enumerate(order.names):
            share = stage.weights.get(name, Fraction(0)) / total
            wanted = np.arange(1, end - stage.first + 1) * share.numerator
            off = np.abs(drawn[:, number] * share.denominator - wanted)
            assert off.max(initial=0) < share.denominator


@given(plans(lengths=(4, 8, 16)), st.data())
def test_a_counter_alone_decides(plan, data):
    order, count = sample_order(plan), plan[-1]
    whole = order.at(np.arange(count))
    asked = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20))
    for counters in (np.array(asked), np.array(asked[:1]), np.array(asked).reshape(-1, 1)):
        found = sample_order(plan).at(counters)
        for name in ("stage", "source", "epoch", "index"):
            assert (getattr(found, name) == getattr(whole, name)[counters]).all()


@given(plans(lengths=(4, 8, 16)), st.data())
def test_what_is_added_for_later_changes_nothing_before(plan, data):
    seed, sources, stages, count = plan
    now = data.draw(st.integers(stages[-1].first + 1, count))
    other = OrderedSource(data.draw(st.text("abcxyz", min_size=4, max_size=4)), 999)
    later = OrderedStage(now, 8, {other.name: Fraction(1), sources[0].name: Fraction(2)})
    before, after = (
        sample_order(plan),
        sample_order((seed, [other, *reversed(sources)], [*stages, later], 0)),
    )
    was, becomes = before.at(np.arange(now)), after.at(np.arange(now))
    assert [before.names[s] for s in was.source] == [after.names[s] for s in becomes.source]
    for name in ("stage", "epoch", "index"):
        assert (getattr(was, name) == getattr(becomes, name)).all()


@given(plans(lengths=(4, 8, 12, 16, 32), windows=(None,)), st.data())
def test_when_a_token_is_seen(plan, data):
    assert_found_again(plan, data)


@given(plans(lengths=(4, 8, 16, 32)), st.data())
def test_when_a_token_of_a_source_with_windows_is_seen(plan, data):
    assert_found_again(plan, data)


def assert_found_again(plan, data):
    order, count = sample_order(plan), plan[-1]
    number = data.draw(st.integers(0, len(order.names) - 1))
    token = data.draw(st.integers(0, order.sources[number].tokens - 1))
    found = order.at(np.arange(count))
    lengths = np.array([stage.length for stage in order.stages])[found.stage]
    has = (found.source == number) & (found.index == token // lengths)
    expected = [(c, found.stage[c], found.epoch[c]) for c in np.flatnonzero(has).tolist()]
    assert [
        tuple(seen) for seen in order.occurrences(order.names[number], token, count)
    ] == expected


@given(plans(lengths=(4, 8)), st.data())
def test_draws_are_counted_without_drawing(plan, data):
    order = sample_order(plan)
    counter = data.draw(st.integers(0, plan[-1]))
    source = order.at(np.arange(counter)).source
    assert list(order.draws_before(counter).values()) == [
        int((source == number).sum()) for number in range(len(order.names))
    ]


def test_epochs_seeds_and_names_have_orders_of_their_own():
    both = {"a": Fraction(1), "b": Fraction(1)}
    seen = set()
    for seed in range(3):
        sources = [OrderedSource(name, 64 * 40) for name in "ab"]
        found = SampleOrder(seed, sources, [OrderedStage(0, 4, both)]).at(np.arange(2 * 639 * 3))
        for number in range(2):
            for epoch in range(3):
                mine = (found.source == number) & (found.epoch == epoch)
                seen.add(tuple(found.index[mine].tolist()))
    assert len(seen) == 18


def test_a_window_needs_few_shards_at_a_time():
    order = SampleOrder(
        3,
        [OrderedSource("a", SHARD * 100 + 20, 4)],
        [OrderedStage(0, 4, {"a": Fraction(1)})],
        shard_tokens=SHARD,
    )
    shards = order.at(np.arange(1604)).index // 16
    for begin in range(0, 1600, 64):
        assert len(set(shards[begin : begin + 64].tolist())) == 4
    assert abs(np.corrcoef(np.arange(100), shards[:1600:16])[0, 1]) < 0.4
    assert set(shards[1600:].tolist()) == {100}


def test_a_batch_is_dealt_so_that_each_rank_sees_each_source():
    both = {"a": Fraction(1), "b": Fraction(1)}
    sources = [OrderedSource("a", 9000), OrderedSource("b", 9000)]
    order = SampleOrder(5, sources, [OrderedStage(0, 4, both)])
    shares = []
    for first in range(0, 3200, 32):
        batch = order.order_over_ranks(first, 32)
        assert sorted(batch.tolist()) == list(range(first, first + 32))
        shares.append(order.at(batch).source[::2].mean())
    assert 0.4 < np.mean(shares) < 0.6
    assert max(abs(np.array(shares) - 0.5)) < 0.45


def test_a_source_without_a_sample_is_refused_by_name():
    with pytest.raises(ValueError, match="small has 8 tokens: less than one sample of 8"):
        SampleOrder(1, [OrderedSource("small", 8)], [OrderedStage(0, 8, {"small": Fraction(1)})])


@settings(deadline=None)
@given(st.integers(10**12, 10**15))
def test_the_size_depends_on_the_plan_and_not_on_the_corpus(tokens):
    sources = [OrderedSource(name, tokens, 64) for name in "abc"]
    stages = [
        OrderedStage(0, 4096, {"a": Fraction(1), "b": Fraction(2)}),
        OrderedStage(10**9, 2048, {"b": Fraction(1), "c": Fraction(1)}),
    ]
    order = SampleOrder(1, sources, stages)
    begin = time.process_time()
    found = order.at(np.array([0, 10**9 - 1, 10**9, 10**14]))
    assert time.process_time() - begin < 1
    lengths = np.array([stage.length for stage in stages])[found.stage]
    assert ((found.index + 1) * lengths < tokens).all()
    assert sum(turns.source.nbytes + turns.rank.nbytes for turns in order._schedules) < 1000
