"""Best-fit packing: every token once, no document cut that fits, few bins."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.data.packing import answer_bins, conversation_pieces, document_pieces, pack_pieces
from trainctl.data.token_arrays import LossMask

LENGTHS = st.lists(st.integers(0, 40), max_size=60)


def one_by_one(lengths, length):
    """Best-fit decreasing as it is written down: the rooms that are left, sorted."""
    rooms = []
    for size in sorted(lengths, reverse=True):
        fits = [room for room in rooms if room >= size]
        if fits:
            rooms.remove(min(fits))
        rooms.append((min(fits) if fits else length) - size)
    return sorted(rooms)


def test_an_answer_has_its_own_bin_although_another_one_holds_it_too():
    """Records with prompts of 1, 2 and 3 tokens, and one that was not encoded."""
    marks = [0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    ids = np.array([7 + (mark << 15) for mark in marks], "<u2")
    ends = np.array([3, 7, 7, 12])
    bins, counts = answer_bins(ends, 10, LossMask(ids))
    assert [bins.pieces(number) for number in range(3)] == [
        ([0, 0, 10], [3, 1, 2]),
        ([3, 3, 1], [4, 2, 2]),
        ([7, 7, 5], [5, 3, 2]),
    ]
    assert [bins.bin_of(token) for token in range(12)] == [0] * 3 + [1] * 4 + [2] * 5
    assert counts["dropped_unwritten"] == 1 and counts["dropped_too_long"] == 0
    fewer, counts = answer_bins(ends, 9, LossMask(ids))
    assert len(fewer) == 2 and counts["dropped_too_long"] == 1


@given(LENGTHS, st.integers(1, 16))
@settings(max_examples=300, deadline=None)
def test_every_token_is_in_one_bin_and_no_document_is_cut_that_fits(lengths, length):
    ends = np.cumsum(lengths, dtype=np.int64)
    pieces = document_pieces(ends, length)
    bins = pack_pieces(pieces, length)
    seen = np.zeros(sum(lengths), dtype=int)
    whole = set()
    for number in range(len(bins)):
        starts, sizes = bins.pieces(number)
        assert 0 < sum(sizes) <= length and starts == sorted(starts)
        for start, size in zip(starts, sizes, strict=True):
            seen[start : start + size] += 1
            assert bins.bin_of(start) == bins.bin_of(start + size - 1) == number
            whole.add((start, start + size))
    assert (seen == 1).all()
    for end, size in zip(ends.tolist(), lengths, strict=True):
        assert not 0 < size <= length or (end - size, end) in whole
    # Those that are cut are cut into whole samples and a rest.
    assert len(whole) == sum(-(-size // length) for size in lengths)
    # No other rule is at work than the one that has the name.
    rooms = [length - sum(bins.pieces(number)[1]) for number in range(len(bins))]
    assert sorted(rooms) == one_by_one(pieces.lengths.tolist(), length)


def test_a_token_that_was_left_out_is_in_no_bin():
    ends, learnt = np.array([4, 12, 22]), np.zeros(22, dtype=bool)
    learnt[[3, 11, 13]] = True  # the second has nothing to learn in its beginning
    pieces, counts = conversation_pieces(ends, 6, LossMask(learnt.astype("<u2") << 15), cuts=True)
    bins = pack_pieces(pieces, 6)
    assert counts["cut"] == counts["dropped_nothing_left"] == 1
    in_bins = [token for token in range(22) if bins.bin_of(token) is not None]
    assert in_bins == [*range(4), *range(12, 18)]


@given(LENGTHS, st.integers(1, 16))
@settings(deadline=None)
def test_it_is_a_function_of_the_lengths(lengths, length):
    ends = np.cumsum(lengths, dtype=np.uint64)
    first, again = (pack_pieces(document_pieces(ends, length), length) for _ in range(2))
    for name in ("starts", "lengths", "firsts"):
        assert np.array_equal(getattr(first, name), getattr(again, name))


@pytest.mark.parametrize("length", [2048, 8192])
def test_packing_wastes_little_of_typical_documents(length):
    """Lognormal lengths, as those of web pages: the fill is the best there can be within 1 %."""
    lengths = np.random.default_rng(0).lognormal(6.2, 1.3, 300_000).astype(np.int64) + 1
    began = time.process_time()
    bins = pack_pieces(document_pieces(np.cumsum(lengths), length), length)
    assert time.process_time() - began < 5
    least = -(-int(lengths.sum()) // length)
    assert least <= len(bins) <= 1.01 * least
    ends = np.cumsum(lengths)
    cut_by_a_stream = (ends - 1) // length != (ends - lengths) // length
    assert (lengths > length).mean() < 0.7 * cut_by_a_stream.mean()
