"""The JSON reader: lines of keys, and what is wrong with a text."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainctl.config.json_file import parse_json, read_json
from trainctl.errors import TrainctlError

TEXT = """{
  "a": 1,
  "b": {
    "c": [true, null, "x\\u00e9\\n"],
    "d.e": -1.5e3
  }
}
"""


def parse(text):
    return parse_json(text, shown="f.json")


def test_values_and_lines():
    document = parse(TEXT)
    assert document.findings == ()
    assert document.value == json.loads(TEXT)
    assert document.lines[("b", "c")] == 4
    assert document.lines[("b", "d.e")] == 5
    assert document.line_of("b.c") == 4
    assert document.line_of("b.missing") == 3
    assert document.line_of("missing") is None


def test_a_key_that_is_given_twice():
    document = parse('{"a": 1,\n "b": {"x": 1,\n "x": 2}}')
    (finding,) = document.findings
    assert (finding.rule, finding.key, finding.source) == ("TC201", "b.x", "f.json:3")
    assert "first in line 2" in finding.message
    assert document.value == {"a": 1, "b": {"x": 2}}


def test_comments_and_a_comma_too_many_are_read_and_reported():
    document = parse('{ // one\n # two\n "a": 1, /* three\n */ "b": [1,],\n}')
    assert document.value == {"a": 1, "b": [1]}
    assert [(each.rule, each.is_error) for each in document.findings] == [("TC202", False)] * 2


@pytest.mark.parametrize(
    ("text", "message", "where"),
    [
        ("", "the file is empty", "1:1"),
        ("[1]", "an object in braces", "1:1"),
        ('{"a": 1', "expected a comma or }", "1:8"),
        ('{"a" 1}', 'expected a colon after "a"', "1:6"),
        ("{a: 1}", "a key in double quotes", "1:2"),
        ("{'a': 1}", "a key in double quotes", "1:2"),
        ('{"a": tru}', "expected a value", "1:7"),
        ('{"a": True}', "True is not JSON", "1:7"),
        ('{"a": NaN}', "NaN is no number", "1:7"),
        ('{"a": 1e999}', "too large a number", "1:12"),
        ('{"a": 01}', "expected a value", "1:7"),
        ('{"a": "x\ny"}', "does not end on its line", "1:7"),
        ('{"a": 1} x', "nothing may follow", "1:10"),
        ('{"a": ' + "[" * 100 + "]" * 100 + "}", "levels", "1:71"),
        ('{"a": ' + "9" * 500 + "}", "too long", "1:507"),
        ("\n\n{\n  oops\n}", "double quotes", "4:3"),
    ],
)
def test_invalid_json_is_reported_with_its_position(text, message, where):
    document = parse(text)
    (finding,) = document.findings
    assert finding.rule == "TC200" and finding.is_error
    assert message in finding.message
    assert finding.source == f"f.json:{where}"
    assert not document.is_readable


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(TrainctlError, match="cannot be read"):
        read_json(tmp_path / "missing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TrainctlError, match="UTF-8"):
        read_json(tmp_path / "binary")


def test_a_byte_order_mark_is_no_matter(tmp_path):
    (tmp_path / "f.json").write_bytes(b"\xef\xbb\xbf{}")
    assert read_json(tmp_path / "f.json").findings == ()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200)
@given(st.dictionaries(st.text(), JSON, max_size=4), st.booleans())
def test_whatever_json_writes_is_read_back(value, indented):
    text = json.dumps(value, indent=2 if indented else None, ensure_ascii=indented)
    document = parse(text)
    assert document.findings == ()
    assert document.value == value


@settings(max_examples=300)
@given(st.text(alphabet='{}[]",:0123456789.eE+-\\u/*#\n truefalsn\u00e9', max_size=40))
@example('{"\\ud800": 1}')
@example("{" * 5000)
@example("/*")
def test_any_text_gives_a_document_or_a_finding(text):
    document = parse(text)
    try:
        value = json.loads(text)
    except ValueError:
        assert document.findings
    else:
        # Half of a pair of escapes is no character, and becomes a replacement for one.
        if isinstance(value, dict) and document.is_readable and "\\ud" not in text:
            assert document.value == value
