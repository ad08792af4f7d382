"""Tests of which shards samples need and when, and of what is evicted for them."""

from __future__ import annotations

from fractions import Fraction
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.config.registry import new_section
from trainctl.data.order import OrderedSource, OrderedStage, SampleOrder
from trainctl.data.streaming.cache import Lookahead, choose_evictions
from trainctl.data.streaming.corpora import open_streamed_corpus
from trainctl.data.streaming.transfer import (
    ShardFacts,
    StreamRecord,
    pack_shard,
    shard_file_name,
    shard_spans,
    shards_covering,
    split_and_number,
    unpack_shard,
)
from trainctl.data.tokenizer import ByteTokenizer
from trainctl.errors import TrainctlError


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 90), st.integers(0, 40), st.integers(2, 20))
def test_tokens_are_in_the_shards_that_are_named_and_in_no_fewer(start, length, size):
    stop = start + length
    shards = shards_covering(start, stop, size)
    held = {token for k in shards for token in range(k * size, k * size + size + 1)}
    assert held >= set(range(start, stop))
    for left_out in shards:
        rest = {t for k in shards if k != left_out for t in range(k * size, k * size + size + 1)}
        assert not rest >= set(range(start, stop))


@given(st.integers(0, 7), st.integers(1, 8))
def test_a_sample_of_a_length_that_divides_is_in_one_shard(index, length):
    assert len(shards_covering(index * length, (index + 1) * length + 1, 4 * length)) == 1


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=40),
    st.integers(1, 30),
    st.sampled_from(["<u2", "<u4"]),
)
def test_a_shard_has_its_tokens_the_next_one_and_its_ends(lengths, size, dtype):
    ends = np.cumsum(lengths, dtype="<u8")
    tokens = int(ends[-1]) if lengths else 0
    ids = np.arange(tokens, dtype=dtype)
    found = []
    for start, stop in shard_spans(tokens, size):
        raw = pack_shard(ids, ends, start, stop, np.dtype(dtype))
        width = np.dtype(dtype).itemsize * (min(stop + 1, tokens) - start)
        facts = ShardFacts((len(raw) - width) // 4, len(raw), 0)
        shard, relative = unpack_shard(memoryview(raw), facts, np.dtype(dtype))
        assert shard.tolist() == ids[start : stop + 1].tolist()
        assert all(0 <= end <= stop - start for end in relative.tolist())
        found += [start + end for end in relative.tolist()]
    assert found == (ends.tolist() if tokens else [])


def test_names_and_records_are_read_as_they_were_written():
    assert split_and_number(shard_file_name("held_out", 123456)) == ("held_out", 123456)
    sides = {"train": (ShardFacts(1, 8, 5), ShardFacts(1, 6, 7)), "held_out": ()}
    corpus = {"digest": "d", "dtype": "<u2", "train": {"tokens": 3}, "held_out": {"tokens": 0}}
    record = StreamRecord(corpus, "fingerprint", 2, sides)
    assert StreamRecord.from_json(record.as_json(), "here") == record
    elsewhere = record.as_json().replace(b'"d"', b'"/../../d"')
    for text in (b"{}", b"[", record.as_json().replace(b'"format": 1', b'"format": 2'), elsewhere):
        with pytest.raises(TrainctlError, match="here is no record of a prepared corpus"):
            StreamRecord.from_json(text, "here")


def test_a_corpus_of_a_later_version_is_refused_in_words(tmp_path):
    sides = {"train": {"tokens": 0}, "held_out": {"tokens": 0}}
    corpus = {"digest": "d", "dtype": "<u2", "of_later": 1, **sides}
    tokenizer = ByteTokenizer()
    record = StreamRecord(corpus, tokenizer.fingerprint, 2, {"train": (), "held_out": ()})
    (tmp_path / "stream.json").write_bytes(record.as_json())
    section = new_section("data", "stream", url=str(tmp_path), cache_folder=str(tmp_path))
    with pytest.raises(TrainctlError, match="is not understood"):
        open_streamed_corpus(section, tokenizer, print)


uses = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2),
    st.one_of(st.integers(0, 9), st.just(inf)),
    max_size=8,
)


@given(uses, st.integers(-5, 12), st.integers(-1, 9))
def test_what_is_removed_is_needed_last_and_no_more_than_has_to_be(next_use, missing, later_than):
    here = dict.fromkeys(next_use, 2)
    removed = choose_evictions(here, missing, next_use.__getitem__, later_than)
    most = sum(2 for name in here if next_use[name] > later_than)
    assert (removed is None) == (most < missing)
    if removed is not None:
        assert 2 * len(removed) >= missing > 2 * (len(removed) - 1) or not removed
        kept = [next_use[name] for name in here if name not in removed]
        assert all(later_than < next_use[name] for name in removed)
        assert not removed or not kept or min(next_use[n] for n in removed) >= max(kept)


def needs_of(order, source, length, shard_tokens):
    """Return a rank's function that gives the shards of a source needed by a range of samples."""

    def needs(first, count):
        samples = order.at(np.arange(first, first + count))
        index = samples.index[samples.source == source]
        return list(dict.fromkeys((index * length // shard_tokens).tolist()))

    return needs


@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32),
    st.integers(5, 40),
    st.integers(1, 5),
    st.integers(1, 64),
    st.integers(0, 30),
    st.lists(st.integers(0, 400), min_size=1, max_size=6),
)
def test_what_is_in_sight_is_what_samples_need(seed, shards, window, chunk, lag, moves):
    length, size, end = 4, 32, 500
    order = SampleOrder(
        seed,
        [OrderedSource("a", shards * size, window), OrderedSource("b", 300)],
        [OrderedStage(0, length, {"a": Fraction(2), "b": Fraction(1)})],
        shard_tokens=size,
    )
    needs = needs_of(order, 0, length, size)
    ahead = Lookahead(needs, end=end, room=2 * window, shards=shards, lag=lag, chunk=chunk)
    for at in moves:  # back and forth, as rewinds do
        ahead.move(at)
        now = needs(max(0, at - lag), at - max(0, at - lag) + 1)
        assert all(ahead.next_use(shard) == 0 for shard in now)
        while ahead.look():
            pass
        wanted = ahead.wanted()
        assert len(wanted) >= min(2 * window, len(needs(at, end - at)))
        real = needs(at, end - at)
        later = [shard for shard in wanted if ahead.next_use(shard)]
        assert later == [shard for shard in real if shard in later]
        # What is not in sight is needed after all that is.
        assert all(ahead.next_use(shard) is None for shard in set(real) - set(wanted))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(3, 30), st.integers(1, 4))
def test_two_windows_of_room_fetch_each_shard_once_an_epoch(seed, shards, window):
    """The cache serves one process that reads samples in order and fetches in between."""
    length, size, chunk = 4, 64, 8
    order = SampleOrder(
        seed,
        [OrderedSource("a", shards * size + 1, window)],
        [OrderedStage(0, length, {"a": Fraction(1)})],
        shard_tokens=size,
    )
    needs, samples = needs_of(order, 0, length, size), shards * size // length
    room = 2 * window
    ahead = Lookahead(needs, end=samples, room=room, shards=shards, lag=0, chunk=chunk)
    next_use = lambda name: inf if (use := ahead.next_use(int(name))) is None else use  # noqa: E731
    here, fetched = {}, []

    def fetch(name, later_than):
        removed = choose_evictions(here, len(here) + 1 - room, next_use, later_than)
        if removed is None:
            return
        for each in removed:
            assert next_use(each) > 0  # never what is needed now
            del here[each]
        here[name] = 1
        fetched.append(name)

    for at in range(samples):
        ahead.move(at)
        while ahead.look():
            pass
        for shard in needs(at, 1):
            if str(shard) not in here:
                fetch(str(shard), -1)
            assert str(shard) in here
        for shard in ahead.wanted():
            if str(shard) not in here:
                fetch(str(shard), next_use(str(shard)))
                break
        assert len(here) <= room
    assert sorted(map(int, fetched)) == list(range(shards))
