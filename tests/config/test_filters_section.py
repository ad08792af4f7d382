"""`data.filters`: a section for each filter by its name, set by files and overrides."""

from __future__ import annotations

import pytest

from trainctl.config.compose import compose, compose_leniently, recompose
from trainctl.config.json_schema import option_schema
from trainctl.readers.quality import filters_of

OF_FILES = ["data=files", "data.paths=[a]"]


def test_a_filter_is_there_when_it_is_named() -> None:
    keys = ["data.filters.gopher_quality.min_words=40", "data.filters.c4={}"]
    data = compose([*OF_FILES, *keys]).config.data
    assert data.filters == {"gopher_quality": {"min_words": 40}, "c4": {}}
    gopher, c4 = filters_of(data).values()
    assert (gopher.min_words, gopher.min_stop_words, c4.min_sentences) == (40, 2, 5)
    assert data.has_quality_rules and not compose(OF_FILES).config.data.has_quality_rules


def test_keys_are_set_one_by_one_and_null_takes_a_filter_out() -> None:
    saved = compose([*OF_FILES, "data.filters.gopher_quality.min_words=40"]).config
    changed = recompose(saved, ["data.filters.gopher_quality.max_words=70"]).config.data
    assert changed.filters == {"gopher_quality": {"min_words": 40, "max_words": 70}}
    without = recompose(saved, ["data.filters.gopher_quality=null"]).config.data
    assert filters_of(without) == {} and not without.has_quality_rules
    assert recompose(saved, ["data=stdlib"]).config.data.filters == {}


def test_a_source_has_filters_of_its_own() -> None:
    text = "data.sources={code: {weight: 1, filters: {words: {file: a.txt}}}}"
    more = "data.sources.code.filters.c4.min_sentences=3"
    (code,) = compose([text, more]).config.data.sources.values()
    assert code.filters == {"words": {"file": "a.txt"}, "c4": {"min_sentences": 3}}
    assert not hasattr(compose([text]).config.data.sources["code"].filters, "dedup")


@pytest.mark.parametrize(
    ("text", "key", "message", "hint"),
    [
        ("{gopher_qualty: {}}", "gopher_qualty", "no filter gopher_qualty", "did you mean gopher"),
        ("{c4: {min_sentnces: 3}}", "c4.min_sentnces", "no key", "did you mean min_sentences?"),
        ("{c4: {min_words: 3}}", "c4.min_words", "no key min_words", "gopher_quality has it"),
        ("{c4: {min_sentences: -1}}", "c4.min_sentences", "below", "nearest legal value: 0"),
        ("{c4: 3}", "c4", "expected a section, got 3", "its keys: min_sentences"),
        ("[c4]", "", "expected a mapping", "gopher_quality"),
    ],
)
def test_what_is_wrong_is_named_where_it_is(text: str, key: str, message: str, hint: str) -> None:
    for where in ("data.filters", "data.sources.code.filters"):
        (finding,) = compose_leniently([f"{where}={text}", *OF_FILES]).findings
        assert finding.key == f"{where}.{key}".rstrip(".")
        assert message in finding.message and hint in finding.hint


def test_editors_know_the_keys_of_each_filter() -> None:
    filters, *_ = option_schema("data")["properties"]["filters"]["anyOf"]
    assert "min_words" in filters["properties"]["gopher_quality"]["properties"]
    assert filters["additionalProperties"] is False
