"""Curves made shorter: nothing that stands out is lost, and the page's text of them is exact."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.monitor.report import columns


@given(st.integers(1, 5000), st.integers(64, 600), st.lists(st.integers(-5, 6000), max_size=9))
def test_buckets_cover_all_rows_and_are_few(length: int, most: int, marks: list[int]) -> None:
    at = columns.bucket_edges(length, most, marks)
    assert at[0] == 0 and at[-1] < length and (np.diff(at) > 0).all()
    assert len(at) <= most + 1


def test_the_newest_rows_and_those_around_marks_are_whole() -> None:
    at = set(columns.bucket_edges(1_000_000, 8000, [500_000]).tolist())
    assert set(range(999_000, 1_000_000)) <= at
    assert set(range(499_900, 500_100)) <= at


@given(st.integers(0, 2**32 - 1))
def test_extremes_and_means_survive(seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = chance.normal(size=4000)
    values[chance.random(4000) < 0.1] = np.nan
    values[chance.integers(4000)] = np.inf
    at = columns.bucket_edges(4000, 200, [1000])
    found = columns.reduce_columns(values, at)
    for row, rows in enumerate(np.split(values, at[1:])):
        rows = rows[np.isfinite(rows)]
        wanted = (rows.mean(), rows.min(), rows.max()) if len(rows) else (np.nan,) * 3
        own = (found.mean[row], found.min[row], found.max[row])
        np.testing.assert_allclose(own, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("exactly", [True, False])
def test_a_column_as_text(exactly: bool) -> None:
    values = np.array([0.0, 1.0, -2.5, 3.14159265, 1e-30, 7e30, np.nan, 16_777_215.0])
    told = columns.pack_column(values, exactly=exactly)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(told["data"])), dtype=np.uint8)
    found = planes.reshape(4, told["n"]).T.copy().view("<f4").ravel()
    np.testing.assert_allclose(found, values, rtol=1e-7 if exactly else 2**-15)
    assert columns.plain_numbers(values)[6] is None
