"""Fields of conversations that a chat template leaves out, before a start."""

import json
from pathlib import Path

import pytest
from chat_files import UNMARKED, asked, write_tokenizer

from trainctl.cli.main import run
from trainctl.config.compose import compose
from trainctl.errors import ExitCode, Severity
from trainctl.launchers.config_checks import check_templates

CALL = {"function": {"name": "f", "arguments": "{}"}}
CALLING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
]
THINKING = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "c"},
]
WITHOUT_CALLS = UNMARKED.replace("message.tool_calls", "message.nothing")
CHAT = ["recipe=tiny", "data.paths=[chat.jsonl]", "tokenizer=hf", "tokenizer.path=m"]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))


def write(template, *conversations):
    write_tokenizer(Path("m"), template)
    rows = [json.dumps(each if "chosen" in each else {"messages": each}) for each in conversations]
    Path("chat.jsonl").write_text("\n".join(rows))


def found(*overrides):
    return {
        each.rule: (each.severity, each.message)
        for each in check_templates(compose([*CHAT, *overrides]).config)
    }


def test_fields_that_a_template_leaves_out_are_counted():
    write(WITHOUT_CALLS, *[asked(("a", "b"))] * 5, *[CALLING] * 2, THINKING)
    told = found("data=chat")
    assert told == {
        "TC550": (
            Severity.error,
            "2 of the first 8 records have tool calls that the chat template leaves out",
        ),
        "TC551": (
            Severity.warning,
            "1 of the first 8 records have reasoning that the chat template leaves out",
        ),
    }
    told = found("data=chat", "data.on_bad_text=skip")
    assert told["TC550"][0] is Severity.warning and "and are skipped" in told["TC550"][1]
    write(UNMARKED, *[asked(("a", "b"))] * 5, *[CALLING] * 2)
    assert found("data=chat") == {}


def test_calls_in_pairs_are_counted_too():
    pair = {"prompt": CALLING[:1], "chosen": CALLING[1:], "rejected": THINKING[1:]}
    write(WITHOUT_CALLS, *[pair] * 3)
    assert {rule: words.split()[0] for rule, (_, words) in found("data=preferences").items()} == {
        "TC550": "3",
        "TC551": "3",
    }


def test_a_template_of_what_is_learnt_is_looked_for(capsys):
    write(UNMARKED, *[asked(("a", "b"))] * 9)
    assert run(["validate", *CHAT, "data=chat", "data.learn=asistant"]) == ExitCode.bad_input
    assert "data.learn=asistant is none of assistant, last, all" in capsys.readouterr().err


def test_a_launch_is_refused_where_calls_vanish(capsys):
    write(WITHOUT_CALLS, *[asked(("what is it?", "it is nothing"))] * 99, CALLING)
    assert run(["validate", *CHAT, "data=chat"]) == ExitCode.bad_input
    assert (
        "error[TC550]: data.chat_template: 1 of the first 100 records have tool calls"
        in capsys.readouterr().err
    )
