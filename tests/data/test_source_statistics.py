"""`data stats`: documents, lengths and copies, against counting them by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainctl.data.statistics import PERCENTILES, SourceText, statistics_of

documents = st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12)


def text_of(found: list[list[int]]) -> SourceText:
    tokens = np.array([token for each in found for token in each], dtype=np.uint16)
    return SourceText(tokens, np.cumsum([len(each) for each in found], dtype=np.uint64), 2, 30)


def text(ids: list[int]) -> str:
    return "ab" * len(ids)


@given(documents, documents)
def test_statistics_equal_a_plain_count(first: list[list[int]], second: list[list[int]]) -> None:
    done: list[tuple[int, int]] = []
    found = statistics_of(
        {"first": text_of(first), "second": text_of(second)},
        text,
        lambda at, whole: done.append((at, whole)),
    )
    before: set[tuple[int, ...]] = set()
    for name, each in (("first", first), ("second", second)):
        lengths = sorted(map(len, each))
        own = found[name]
        copies = 0
        for document in filter(None, each):
            copies += tuple(document) in before
            before.add(tuple(document))
        assert own.copies == copies
        assert (own.documents, own.tokens) == (len(each), sum(lengths))
        assert (own.held_out_documents, own.held_out_tokens) == (2, 30)
        assert own.bytes_per_token == (2.0 if sum(lengths) else None)
        assert own.longest == max(lengths, default=0)
        power = {0: 1, 1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8}
        assert own.lengths == Counter(power[length] for length in lengths)
        for level in PERCENTILES if lengths else ():
            at = own.percentiles[level]
            assert sum(length <= at for length in lengths) * 100 >= level * len(lengths)
            assert sum(length < at for length in lengths) * 100 < level * len(lengths)
    whole = sum(map(len, first + second))
    assert all(total == whole for _, total in done)
    assert done == sorted(done)
