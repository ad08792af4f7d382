"""Records of Parquet and Arrow files are those of JSONL, whatever their columns' types add."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_files import write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainctl.config.registry import new_section
from trainctl.data.record_encoders import ChatEncoder
from trainctl.data.tokenizer import FileTokenizer
from trainctl.readers.documents import Reader

arrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

TEXTS = st.text("ab ", min_size=1, max_size=4)


def objects(**fields: st.SearchStrategy) -> st.SearchStrategy[dict]:
    """Return objects with some of the fields, in this order."""
    return st.fixed_dictionaries({}, optional=fields).map(
        lambda found: {name: found[name] for name in fields if name in found}
    )


PLACE = objects(name=TEXTS, at=objects(lat=st.integers(0, 9), long=st.integers(0, 9)))
ARGUMENTS = objects(
    city=TEXTS,
    x=st.integers(0, 9),
    places=st.lists(PLACE, max_size=2),
    one=PLACE,
    gaps=st.lists(st.none() | st.integers(0, 9), max_size=3),
)
PROPERTIES = objects(
    city=objects(type=TEXTS, enum=st.lists(TEXTS, max_size=2)), x=objects(type=TEXTS)
)


@st.composite
def conversations(draw: st.DrawFn) -> dict:
    call = {"name": "f", "arguments": draw(ARGUMENTS)}
    answer = {"role": "assistant", "content": draw(TEXTS)}
    if draw(st.booleans()):
        answer["tool_calls"] = [{"type": "function", "function": call}]
    function = {"name": "f", "parameters": {"type": "object", "properties": draw(PROPERTIES)}}
    messages = [{"role": "user", "content": draw(TEXTS)}, answer]
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


FULL = {
    "messages": [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "a",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "arguments": {
                            "city": "a",
                            "x": 1,
                            "places": [{"name": "a", "at": {"lat": 1, "long": 1}}],
                            "one": {"name": "a", "at": {"lat": 1, "long": 1}},
                            "gaps": [1],
                        },
                    },
                }
            ],
        },
    ],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {
                    "type": "object",
                    "properties": {"city": {"type": "a", "enum": ["a"]}, "x": {"type": "a"}},
                },
            },
        }
    ],
}
"""A row with all fields: a table has one order of an object's fields, that of the first rows."""


def files_of(folder: Path, rows: list[dict]) -> list[Path]:
    """Write rows as JSONL, Parquet and Arrow."""
    paths = [folder / f"rows.{ending}" for ending in ("jsonl", "parquet", "arrow")]
    paths[0].write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = arrow.Table.from_pylist(rows)
    parquet.write_table(table, paths[1])
    with arrow.ipc.new_file(paths[2], table.schema) as file:
        file.write_table(table)
    return paths


def ids_of(path: Path, encoder: ChatEncoder) -> list[list[int]]:
    documents = Reader(new_section("data", "chat")).documents([path])
    return [ids.tolist() for ids in encoder.encode_all([each.text for each in documents])]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ChatEncoder:
    template = (
        "{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message['content'] }}"
        "{{ (message.tool_calls or []) | tojson }}<|im_end|>{% endfor %}"
    )
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template)
    return ChatEncoder(new_section("data", "chat"), FileTokenizer(folder / "tokenizer.json"))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(conversations(), min_size=1, max_size=6))
def test_a_row_has_the_same_ids_in_every_format(encoder, tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("rows")
    paths = files_of(folder, [FULL, *rows])
    first, *others = (ids_of(path, encoder) for path in paths)
    assert [first, first] == others


def test_nulls_go_where_a_struct_has_no_such_field_and_stay_elsewhere(tmp_path):
    rows = [
        {"prompt": "a", "answer": {"x": [1, None], "y": {"z": 1}}, "few": None},
        {"prompt": "b", "answer": {"w": 2, "y": {"v": 3}}, "few": [{"k": 1}, None, {"l": 2}]},
        {"prompt": "c", "answer": {}, "few": []},
    ]
    kind = arrow.map_(arrow.string(), arrow.struct([("p", arrow.int64()), ("q", arrow.int64())]))
    counts = arrow.array([[("m", {"p": 1})], None, [("n", {"q": 2}), ("o", None)]], kind)
    table = arrow.Table.from_pylist(rows).append_column("counts", counts)
    parquet.write_table(table, tmp_path / "rows.parquet")
    section = new_section("data", "prompts", paths=[str(tmp_path / "rows.parquet")])
    documents = Reader(section).documents([tmp_path / "rows.parquet"])
    found = [json.loads(document.text)["columns"] for document in documents]
    assert [each["answer"] for each in found] == [row["answer"] for row in rows]
    assert [each["few"] for each in found] == [row["few"] for row in rows]
    assert [each["counts"] for each in found] == [
        {"m": {"p": 1}},
        None,
        {"n": {"q": 2}, "o": None},
    ]
