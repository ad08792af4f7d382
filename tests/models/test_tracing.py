"""Tests of the cached traces of a model's own code; unreadable ones are made anew."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
from anatomies import SMALL

from trainctl.config.codec import to_plain
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.errors import TrainctlError
from trainctl.models import tracing


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Configurations that the model's code was traced for, starting from an empty cache."""
    found: list[RunConfig] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tracing, "_known", {})
    monkeypatch.setattr(
        tracing, "_ask_process", lambda question, config, folder: found.append(config) or SMALL
    )
    return found


def config_of(folder: Path) -> RunConfig:
    (folder / "config.json").write_text("{}")
    return RunConfig(model=ModelConfig(name="hf", family="hf", path=str(folder)))


def as_another_command(config: RunConfig) -> list[str]:
    tracing._known.clear()
    return tracing.anatomy_in_child(to_plain(config))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"format": 4, "found": []}', b'{"format": %d}'],
    ids=["empty", "truncated", "a list", "no text", "older", "without an answer"],
)
def test_a_spoilt_file_is_made_anew(content: bytes, asked: list[RunConfig], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert as_another_command(config) == as_another_command(config) == SMALL
    assert len(asked) == 1
    (file,) = (tmp_path / "cache/trainctl/traces").iterdir()
    file.write_bytes(content % tracing.FORMAT if b"%" in content else content)
    assert as_another_command(config) == as_another_command(config) == SMALL
    assert len(asked) == 2
    assert json.loads(file.read_text())["found"] == SMALL


def test_without_a_folder_for_it_each_command_asks(asked: list[RunConfig], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    config = config_of(tmp_path)
    assert as_another_command(config) == as_another_command(config) == SMALL
    assert len(asked) == 2


def test_two_that_ask_at_once_leave_one_answer(
    asked: list[RunConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, both, found = config_of(tmp_path), threading.Barrier(2), []

    def ask(*_: object) -> list[str]:
        both.wait(10)
        return SMALL

    monkeypatch.setattr(tracing, "_ask_process", ask)
    makers = [
        threading.Thread(target=lambda: found.append(tracing.anatomy_in_child(to_plain(config))))
        for _ in range(2)
    ]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert found == [SMALL, SMALL]
    (file,) = (tmp_path / "cache/trainctl/traces").iterdir()
    assert json.loads(file.read_text())["found"] == SMALL
    assert as_another_command(config) == SMALL and not asked


def python_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the process that imports torch: its reply is an expression."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport time\nfrom trainctl.child_processes import serve\n"
        f"serve(lambda question: {does})\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(tracing.sys, "executable", str(program))
    monkeypatch.setattr(tracing, "PROGRESS_SECONDS", 1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(tracing, "_known", {})


def test_whoever_waits_for_a_model_s_code_sees_for_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python_that('time.sleep(1.2) or b\'{"found": ["a"]}\'', tmp_path, monkeypatch)
    assert tracing.anatomy_in_child(to_plain(config_of(tmp_path))) == ["a"]
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "reading hf by its own code, once: torch and transformers are imported"
    assert others == ["  reading hf: 1 s"]
    tracing.anatomy_in_child(to_plain(config_of(tmp_path)))
    assert capsys.readouterr().err == ""


def test_a_model_s_code_that_does_not_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python_that("time.sleep(60)", tmp_path, monkeypatch)
    monkeypatch.setattr(tracing, "SECONDS", 1)
    with pytest.raises(TrainctlError) as caught:
        tracing.anatomy_in_child(to_plain(config_of(tmp_path)))
    assert "its process took more than 1 s" in caught.value.findings[0].message
