from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import lock
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder, hold_lock

HOLD = """
import subprocess, sys, time
from pathlib import Path
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
with hold_lock(RunPaths(Path(sys.argv[1]))) as lock:
    if sys.argv[2] == "with_child":
        subprocess.Popen(["sleep", "1.5"], pass_fds=(lock,), stdout=subprocess.DEVNULL)
    print(flush=True)
    time.sleep(60)
"""


def start_holder(run: RunPaths, kind: str = "alone") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run.root), kind], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_one_launch_at_a_time_and_the_other_names_it(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    assert find_holder(run) is None
    other = start_holder(run)
    try:
        start = time.monotonic()
        with pytest.raises(TrainctlError) as caught, hold_lock(run):
            pass
        assert time.monotonic() - start < 1.0, "a live launch is not waited for"
        assert caught.value.exit_code is ExitCode.run_state
        assert f"process {other.pid} on {socket.gethostname()}" in caught.value.message
        current = find_holder(run)
        assert current is not None and current.pid == other.pid
    finally:
        other.kill()
        other.communicate()
    with hold_lock(run):  # a killed holder holds nothing
        current = find_holder(run)
        assert current is not None and current.pid == os.getpid()
    assert find_holder(run) is None


def test_the_lock_is_reentrant_within_a_process(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with hold_lock(run) as outer:
        with hold_lock(run) as inner:
            assert inner == outer
        assert find_holder(run) is not None
    assert find_holder(run) is None


def test_the_agent_of_a_killed_launcher_keeps_the_lock_and_is_waited_for(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    launcher = start_holder(run, "with_child")
    start = time.monotonic()
    launcher.send_signal(signal.SIGKILL)
    launcher.communicate()
    with pytest.raises(TrainctlError, match="processes of an ended launch"):
        with hold_lock(run, patience_seconds=0.2):
            pass
    with hold_lock(run):
        assert 1.0 < time.monotonic() - start < 6.0


def test_holding_survives_an_error_inside(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with pytest.raises(RuntimeError), hold_lock(run):
        raise RuntimeError
    with hold_lock(run):
        pass


def test_one_that_looks_does_not_keep_a_launch_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`runs ls` holds a shared lock while it reads the entry of a launch killed on another
    machine.
    """
    monkeypatch.setattr(lock, "_LOOK_SECONDS", 60.0)
    run = RunPaths(tmp_path)
    run.lock.write_text('{"pid": 4711, "host": "elsewhere", "since": 1.0}\n')
    with run.lock.open() as looker:
        fcntl.flock(looker, fcntl.LOCK_SH)
        threading.Timer(0.2, fcntl.flock, (looker, fcntl.LOCK_UN)).start()
        with hold_lock(run):
            pass


def test_a_folder_that_cannot_be_locked_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunPaths(tmp_path)
    run.lock.mkdir()
    with pytest.raises(TrainctlError, match=r"cannot be written: Is a directory") as caught:
        with hold_lock(run):
            pass
    assert caught.value.exit_code is ExitCode.environment
    run.lock.rmdir()

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    with hold_lock(run):
        monkeypatch.setattr(fcntl, "flock", refuse)  # as Lustre mounted without -o flock
        assert find_holder(run) is None
    with pytest.raises(TrainctlError, match=r"cannot be locked: Function not impl") as caught:
        with hold_lock(run):
            pass
    assert caught.value.exit_code is ExitCode.environment and "-o flock" in caught.value.hint
