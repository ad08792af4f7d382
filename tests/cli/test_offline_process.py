"""The process that `export`, `sample` and `evaluate` start: its answers, its end, and ours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainctl.cli.console import Meter
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.offline import run_offline
from trainctl.runs.processes import is_alive


def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Replace `sys.executable` by a shell script."""
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_answers_become_progress_and_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ('{"progress": ["loading", 1, 2]}', '{"result": {"loss": 1.5}}')
    stand_in(tmp_path, monkeypatch, f"echo '{answers[0]}'; echo noise >&2; echo '{answers[1]}'")
    seen = []
    monkeypatch.setattr(Meter, "__call__", lambda self, *progress: seen.append(progress))
    assert run_offline("evaluate", {}, Meter()) == {"loss": 1.5}
    assert seen == [("loading", 1, 2)]


def test_its_error_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = '{"error": {"message": "no room", "hint": "make some", "exit_code": 4}}'
    stand_in(tmp_path, monkeypatch, f"echo '{error}'; exit 4")
    with pytest.raises(TrainctlError, match="no room") as caught:
        run_offline("export", {}, Meter())
    assert caught.value.exit_code == ExitCode.environment and caught.value.hint == "make some"


def test_long_arguments_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes 128 KiB in one."""
    script = 'shift 4; printf %s "$@" >given; printf \'{"result": {"words": %d}}\' $#'
    stand_in(tmp_path, monkeypatch, script)
    monkeypatch.chdir(tmp_path)
    assert run_offline("sample", {"prompt": "x" * 250_000}, Meter()) == {"words": 3}
    assert json.loads((tmp_path / "given").read_text()) == {"prompt": "x" * 250_000}


def test_a_kill_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "kill -9 $$")
    with pytest.raises(TrainctlError, match="was to evaluate was ended by SIGKILL") as caught:
        run_offline("evaluate", {}, Meter())
    assert caught.value.exit_code == ExitCode.environment and "memory" in caught.value.hint


def test_a_bug_shows_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "echo 'ZeroDivisionError: oh' >&2; exit 1")
    with pytest.raises(RuntimeError, match="was to sample failed") as caught:
        run_offline("sample", {}, Meter())
    assert caught.value.__notes__ == ["ZeroDivisionError: oh"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_the_command(tmp_path: Path, number: signal.Signals) -> None:
    """The real process is caught while it reads a plan that never comes: its file is a fifo."""
    run = tmp_path / "run"
    (run / "attempts" / "1").mkdir(parents=True)
    os.mkfifo(run / "attempts" / "1" / "plan.json")
    script = (
        "import sys\nfrom trainctl.cli.console import Meter\n"
        "from trainctl.launchers.offline import run_offline\n"
        "where = dict(run=sys.argv[1], checkpoint=sys.argv[1])\n"
        "run_offline('evaluate', where, Meter())\n"
    )
    command = subprocess.Popen([sys.executable, "-c", script, str(run)], stderr=subprocess.DEVNULL)
    try:
        children = wait_for_children(command.pid)
        time.sleep(0.5)
        command.send_signal(number)
        command.wait(timeout=10)
        deadline = time.monotonic() + 5
        while any(is_alive(pid) for pid in children):
            assert time.monotonic() < deadline, "it lives on"
            time.sleep(0.02)
    finally:
        command.kill()
        command.wait()


def wait_for_children(pid: int) -> list[int]:
    file = Path(f"/proc/{pid}/task/{pid}/children")
    deadline = time.monotonic() + 20
    while not file.read_text().split():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(child) for child in file.read_text().split()]
