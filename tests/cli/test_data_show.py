"""`trainctl data show` of a recipe: what its samples will be, before there is a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from chat_files import asked, write_tokenizer

from trainctl.cli.main import run
from trainctl.errors import ExitCode

CHAT = ["recipe=tiny", "data=chat", "data.paths=[chat.jsonl]", "tokenizer=hf", "tokenizer.path=m"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path / "cache"))
    rows = (json.dumps({"messages": asked((f"what is {n}?", f"it is {n}"))}) for n in range(100))
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    write_tokenizer(tmp_path / "m")


def test_conversations_are_shown_with_their_loss_mask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["data", "show", *CHAT, "--samples", "0"]) == 0
    shown = capsys.readouterr()
    assert "chat.jsonl:" in shown.out and "  | [[it is " in shown.out
    assert "92 conversations to train on, 8 held out" in shown.err
    assert not Path("runs").exists()


def test_a_name_that_is_only_letters_is_told_from_the_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    messages = asked(("say <pad>", "it is <pad>"))
    Path("chat.jsonl").write_text((json.dumps({"messages": messages}) + "\n") * 100)
    assert run(["data", "show", *CHAT, "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert r"say \<pad><|im_end|>" in shown and "[[it is <pad><|im_end|>" in shown


def test_a_step_has_the_samples_that_the_plan_gives_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "show", *CHAT, "--step", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] is None
    assert [sample["counter"] for sample in found["samples"]] == list(range(16, 32))
    assert run(["data", "show", "tiny", *CHAT[1:], "--step", "161"]) == ExitCode.bad_input
    assert "the plan ends with step 160" in capsys.readouterr().err


def test_reasons_why_samples_cannot_be_shown_are_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["data", "show", "--samples", "0"]) == ExitCode.bad_input
    assert "which samples of which run or recipe" in capsys.readouterr().err
    assert run(["data", "show", "recipe=tiny", "data=chat", "--samples", "0"]) == 2
    assert "needs data.paths" in capsys.readouterr().err
    Path("a.txt").write_text("few words " * 30)
    text = ["recipe=tiny", "data=files", "data.paths=[a.txt]", "training.sequence_length=1024"]
    assert run(["data", "show", *text, "--samples", "0"]) == 2
    assert "less than one sample" in capsys.readouterr().err
