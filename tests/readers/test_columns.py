"""`data.columns` names the keys of records that have other names than those that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_files import asked

from trainctl.cli.main import run
from trainctl.config.registry import new_section
from trainctl.options.data import document_identity
from trainctl.readers.documents import Reader

MESSAGES = asked(("a?", "b"), system="S")
TURNS = [{"from": each["role"], "value": each["content"]} for each in MESSAGES]
SPOKEN = [{"speaker": each["role"], "text": each["content"]} for each in MESSAGES]
HUMAN = [{"role": {"user": "human", "assistant": "gpt"}.get(each["role"], each["role"]),
          "content": each["content"]} for each in MESSAGES]  # fmt: skip
CONVERSATION = {"messages": MESSAGES}
PAIR = {"prompt": "a?", "chosen": "b", "rejected": "c"}
CASES = {
    "messages": ("chat", {"dialog": MESSAGES}, {"messages": "dialog"}, CONVERSATION),
    "turns": (
        "chat",
        {"dialog": SPOKEN},
        {"messages": "dialog", "role": "speaker", "content": "text"},
        CONVERSATION,
    ),
    "sharegpt": ("chat", {"items": TURNS}, {"conversations": "items"}, CONVERSATION),
    "roles": ("chat", {"messages": HUMAN}, {}, CONVERSATION),
    "alpaca": (
        "chat",
        {"q": "a?", "a": "b", "s": "S", "output": "another column"},
        {"instruction": "q", "output": "a", "system": "s"},
        CONVERSATION,
    ),
    "pair": ("preferences", {"q": "a?", "chosen": "c", "rejected": "b"},
             {"prompt": "q", "chosen": "rejected", "rejected": "chosen"}, PAIR),
    "answer": ("answers", {"prompt": "a?", "completion": "b", "kto_tag": True},
               {"label": "kto_tag"}, {"prompt": "a?", "completion": "b", "label": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_records_are_read_by_the_names_that_are_told(tmp_path, case):
    kind, record, columns, wanted = CASES[case]
    path = tmp_path / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    section = new_section("data", kind, paths=[str(path)], columns=columns)
    (document,) = Reader(section).documents([path])
    assert json.loads(document.text) == wanted
    plain = new_section("data", kind, paths=[str(path)])
    assert (document_identity(section) == document_identity(plain)) is (not columns)


def test_a_name_that_nothing_reads_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(json.dumps({"dialog": MESSAGES}) + "\n")
    named = ["data=chat", "data.paths=[a.jsonl]", "data.columns={mesages: dialog}"]
    assert run(["validate", "recipe=tiny", *named]) == 2
    said = capsys.readouterr().err
    assert "error[TC555]" in said and "data.columns={messages: dialog}" in said
