"""Damaged and hostile files of a run: named, bounded, and no other run is kept from view."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from trainctl.cli.console import print_data, print_json
from trainctl.cli.main import run as command
from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events

DEEP = b"[" * 100_000 + b"]" * 100_000
NAMES = ("run.json", "status.json", "attempts/1/plan.json", "attempts/1/job.json", "events.jsonl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a good run, and one run for each file that may be damaged."""
    root = tmp_path_factory.mktemp("runs")
    config = compose(["recipe=tiny"]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    for name in ("good", *(f"bad-{index}" for index in range(len(NAMES)))):
        new_attempt(create_run(config, run_dir=root / name), plan)
    return root


@pytest.mark.parametrize(
    "content",
    [DEEP, b'{"a": ' * 100_000, b"\xff\xfe", b"", b"[]", b'{"id": 1e999, "created": NaN}', "pipe",
     b'{"id": "x", "created": 1' + b"0" * 400 + b"}", "folder"],
    ids=["deep list", "deep mapping", "no text", "empty", "list", "NaN", "pipe", "huge", "folder"],
)  # fmt: skip
def test_one_bad_file_keeps_no_other_run_from_view(
    runs: Path, content: bytes | str, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = {}
    try:
        for index, name in enumerate(NAMES):
            file = runs / f"bad-{index}" / name
            kept[file] = file.read_bytes() if file.exists() else None
            file.unlink(missing_ok=True)
            if content == "pipe":
                os.mkfifo(file)
            elif content == "folder":
                file.mkdir()
            else:
                assert isinstance(content, bytes)
                file.write_bytes(content)
        assert command(["runs", "ls", str(runs), "--json"]) == 0
        listed = json.loads(capfd.readouterr().out)["runs"]
        assert str(runs / "good") in [run["path"] for run in listed]
        for index in range(len(NAMES)):
            for words in (["status"], ["logs"]):
                assert command(["runs", *words, str(runs / f"bad-{index}")]) in (0, 5)
        assert "Traceback" not in capfd.readouterr().err
    finally:
        for file, before in kept.items():
            file.rmdir() if file.is_dir() else file.unlink()
            if before is not None:
                file.write_bytes(before)


def test_records_that_lack_something_are_completed_or_passed_over(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = RunPaths(runs / "good")
    lines = ['{"event": "failure", "attempt": 1}', '{"event": "step", "attempt": 1}', "[" * 99_999]
    lines += ['{"event": "step", "step": 3}', '{"event": ["failure"], "attempt": 1}']
    run.events.write_text("".join(f"{line}\n" for line in lines))
    (failure,) = read_events(run.events)
    assert failure["log_tail"] == [] and failure["rank"] is None
    for words in (["status"], ["status", "--json"], ["logs"]):
        assert command(["runs", words[0], str(run.root), *words[1:]]) == 0
        assert "does not say what it was" in capfd.readouterr().out
    run.events.unlink()


def test_names_with_escapes_and_other_bytes_are_seen_and_not_obeyed(
    runs: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    name = os.fsdecode(b"evil-\x1b]0;owned\x07\x1b[2J-\xc2\x9b31m-\xff")
    folder = tmp_path / name
    (runs / "good").rename(folder)
    try:
        for words in (["ls", str(tmp_path)], ["status", str(folder)], ["logs", str(folder)],
                      ["ls", str(tmp_path), "--json"], ["status", str(folder), "--json"],
                      ["status", str(folder / "nothing")], ["rm", f"{folder}x"]):  # fmt: skip
            assert command(["runs", *words]) in (0, 5)
            said = capfdbinary.readouterr()
            assert not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]|\xc2[\x80-\x9f]", said.out + said.err)
            if words[-1] == "--json":
                listed = json.loads(said.out)
                assert listed.get("runs", [listed])[0]["path"] == str(folder)
    finally:
        folder.rename(runs / "good")


def test_json_and_lines_have_no_control_characters(capfd: pytest.CaptureFixture[str]) -> None:
    print_data("a\x1b[31m\x9b\r\u202eb\tc", style="")
    print_json({"a": "\x1b\x9b\u202e"}, indent=None)
    said = capfd.readouterr().out
    assert said.splitlines()[0] == "a\\x1b[31m\\x9b\\r\\u202eb\tc"
    assert json.loads(said.splitlines()[1]) == {"a": "\x1b\x9b\u202e"} and "\x9b" not in said
