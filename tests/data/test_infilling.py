"""Fill-in-the-middle: the same document wherever it is read, of the same length."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainctl.data.infilling import Infilling
from trainctl.data.source_sampler import splitmix64

PREFIX, MIDDLE, SUFFIX, END = range(1_000_000, 1_000_004)
ALL = Infilling(splitmix64(np.uint64(7)), 1.0, 0.5, PREFIX, MIDDLE, SUFFIX, END)
LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def text_of(lengths):
    """Documents of numbers that rise, each with its end, but for empty ones."""
    documents, at = [], 0
    for length in lengths:
        documents.append([*range(at, at + length - 1), END] if length else [])
        at += length
    ends = np.cumsum([len(each) for each in documents]).astype(np.uint64)
    return documents, np.array([*chain(*documents)], dtype="<u4"), ends


def read(infilling, text, ends, start, stop, epoch=0):
    row = text[start:stop].astype(np.int64)
    infilling.apply(row, start, text, ends, epoch)
    return row.tolist()


@given(LENGTHS, st.integers(0, 3), st.data())
def test_any_range_equals_the_same_range_of_the_whole(lengths, epoch, data):
    _, text, ends = text_of(lengths)
    infilling = replace(ALL, rate=data.draw(st.sampled_from([0.5, 1.0])))
    whole = read(infilling, text, ends, 0, len(text), epoch)
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    assert read(infilling, text, ends, start, stop, epoch) == whole[start:stop]


@given(LENGTHS, st.integers(0, 1000))
def test_a_document_keeps_its_length_and_its_parts(lengths, epoch):
    documents, text, ends = text_of(lengths)
    whole = read(ALL, text, ends, 0, len(text), epoch)
    for document, (begin, end) in zip(documents, pairwise([0, *ends.tolist()]), strict=True):
        found = whole[int(begin) : int(end)]
        if len(document) < 5:  # nothing would be left beside the sentinels
            assert found == document
            continue
        assert found[0] == PREFIX and found[-1] == END and len(found) == len(document)
        assert [found.count(sentinel) for sentinel in (PREFIX, MIDDLE, SUFFIX)] == [1, 1, 1]
        suffix, middle = found.index(SUFFIX), found.index(MIDDLE)
        assert suffix < middle
        before, of_suffix, after = (
            found[1:suffix],
            found[suffix + 1 : middle],
            found[middle + 1 : -1],
        )
        # PSM has the prefix first; SPM has it before the middle, which goes on from it.
        body = document[:-4]
        together = before + after + of_suffix
        assert together == body and (not before or suffix > 1)


def test_how_many_and_which_is_a_function_of_seed_epoch_and_document():
    lengths = [40] * 4000
    _, text, ends = text_of(lengths)
    half = replace(ALL, rate=0.3, spm_rate=0.25)

    def chosen(infilling, epoch):
        whole = np.array(read(infilling, text, ends, 0, len(text), epoch)).reshape(-1, 40)
        is_infilled = whole[:, 0] == PREFIX
        return is_infilled, whole[is_infilled, 1] == SUFFIX

    first, spm = chosen(half, 0)
    assert abs(first.mean() - 0.3) < 0.03
    assert abs(spm.mean() - 0.25) < 0.08  # a prefix without a token looks like one
    again, _ = chosen(half, 0)
    other, _ = chosen(half, 1)
    seed, _ = chosen(replace(half, key=splitmix64(np.uint64(8))), 0)
    assert (first == again).all()
    for different in (other, seed):
        assert abs((first & different).mean() - 0.09) < 0.02
    assert not chosen(replace(half, rate=0.0), 0)[0].any()
