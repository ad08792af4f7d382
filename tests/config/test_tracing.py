"""What is kept of a model's own code between commands: made anew where it cannot be read."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from anatomies import SMALL

from trainctl.config import tracing
from trainctl.config.schema import ModelConfig, RunConfig


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """How often the model's code was asked, in an empty cache folder."""
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
    return tracing.anatomy_in_child(config)


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
        threading.Thread(target=lambda: found.append(tracing.anatomy_in_child(config)))
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
