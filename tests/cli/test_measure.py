"""`estimate-memory --measure`: real steps on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode
from trainctl.hardware.resolve import read_calibration


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINCTL_CALIBRATION_FILE", str(tmp_path / "kept" / "calibration.json"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.mark.slow
def test_two_steps_are_measured_and_what_they_tell_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate-memory", "recipe=tiny", "zero_stage=2"]
    assert run([*arguments, "--measure", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    parts = {row["part"]: row for row in report["phases"]}
    assert list(parts) == ["load", "forward", "backward", "optimizer"]
    # A process with torch loaded, and what a tiny model adds to it.
    assert all(2**27 < row["measured_bytes"] < 2**32 for row in parts.values())
    assert parts["backward"]["measured_bytes"] > parts["load"]["measured_bytes"]
    kept = read_calibration("cpu")
    assert kept is not None and kept.runtime_bytes_alone is None
    assert run([*arguments, "--json"]) == 0
    later = json.loads(capsys.readouterr().out)
    assert later["components"]["runtime"] == kept.runtime_bytes_in_group
    # Nothing of the run is left.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)]
)
def test_the_run_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    words = ["estimate-memory", "recipe=tiny", "hardware.devices_per_node=1", "--measure"]
    process = subprocess.Popen(
        [sys.executable, "-m", "trainctl", *words],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_until(lambda: any("trainctl.train" in line for line in _working_in(tmp_path)))
    finally:
        process.send_signal(number)
        process.wait()
    if number is signal.SIGTERM:
        assert process.returncode == ExitCode.terminated
        assert _working_in(tmp_path) == [] and list(tmp_path.iterdir()) == []
        return
    _wait_until(lambda: not _working_in(tmp_path))
    (records,) = tmp_path.glob("trainctl-*/run/events.jsonl")
    assert '"memory"' not in records.read_text(), "it went on to its end"


def _working_in(folder: Path) -> list[str]:
    """Command lines of the processes that name the folder."""
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    return [line for line in lines if f"{folder}/" in line]


def _wait_until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_what_cannot_be_planned_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate-memory", "recipe=tiny", "training.global_batch_size=31", "--measure"]
    assert run(arguments) == ExitCode.bad_input
    assert "training.global_batch_size" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("preloaded")
def test_a_launch_that_fails_is_shown_and_keeps_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["estimate-memory", "recipe=tiny", "hardware=2xh100-80g", "--measure"]
    assert run(arguments) == ExitCode.environment
    assert "nothing was measured" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
