"""Real signals to real runs: nothing is left, the exit code tells, and resume goes on.

Trainctl's own tests of supervision use stand-in ranks; here the whole command is struck, while it
starts and while it trains.
"""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import TINY, curve, finish, live_processes, start, trainctl

from trainctl.runs.layout import RunPaths

pytestmark = pytest.mark.slow

STRIKES = {
    "rank": (signal.SIGKILL, 137),
    "agent": (signal.SIGKILL, 137),
    "launcher": (signal.SIGKILL, -signal.SIGKILL),
    "interrupt": (signal.SIGINT, 130),
    "terminate": (signal.SIGTERM, 143),
}
CONFIG = (*TINY, "training.steps=100000", "checkpoint.every_steps=5")


@pytest.fixture
def launcher(tmp_path):
    """A launch that trains for ever; killed if a test fails to end it."""
    process = start("launch", *CONFIG, "--run-dir", "run", cwd=tmp_path)
    yield process
    process.kill()


def module_of(pid):
    """The module that a python process runs, or an empty string."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return arguments[arguments.index(b"-m") + 1].decode() if b"-m" in arguments else ""


def target(strike, launcher, run):
    """The pid to strike, once there is one."""
    if strike not in ("rank", "agent"):
        return launcher.pid
    modules = ("trainctl.train",) if strike == "rank" else ("trainctl.agent",)
    return wait(lambda: next((p for p in live_processes(run) if module_of(p) in modules), None))


def wait(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def assert_clean(run):
    wait(lambda: not live_processes(run), seconds=5)


@pytest.mark.parametrize("strike", STRIKES)
def test_struck_while_training(tmp_path, launcher, strike):
    run = tmp_path / "run"
    wait(lambda: len(curve(run)) >= 12)
    number, code = STRIKES[strike]
    os.kill(target(strike, launcher, run), number)
    found, out, err = finish(launcher, timeout=20)
    assert found == code, out + err
    assert "Traceback" not in out + err
    assert_clean(run)
    if strike == "rank":
        assert "SIGKILL" in out + err
    before = curve(run)
    trainctl("resume", "run", "training.stop_after_steps=20", cwd=tmp_path)
    after = curve(run)
    assert list(after) == list(range(1, 21))
    assert all(after[step] == before[step] for step in before if step <= 10)
    status = json.loads(RunPaths(run).status.read_text())
    assert status["state"] == "finished" and status["attempt"] == 2


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("after_seconds", [0.0, 1.0, 3.0])
def test_struck_during_start_up(tmp_path, launcher, strike, after_seconds):
    """`after_seconds` from the moment that the run directory's first attempt has its agent."""
    run = tmp_path / "run"
    wait(lambda: (run / "run.json").is_file() and live_processes(run))
    time.sleep(after_seconds)
    number, code = STRIKES[strike]
    os.kill(target(strike, launcher, run), number)
    found, out, err = finish(launcher, timeout=20)
    assert found == code, out + err
    assert_clean(run)
    assert "Traceback" not in out + err
