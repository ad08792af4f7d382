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
    """Launcher of a run that trains for ever; killed if a test fails to end it."""
    process = start("launch", *CONFIG, "--run-dir", "run", cwd=tmp_path)
    yield process
    process.kill()


def module_of(pid):
    """Return the module that a Python process runs, or an empty string."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return arguments[arguments.index(b"-m") + 1].decode() if b"-m" in arguments else ""


def target(strike, launcher, run):
    """Return the pid to kill, once there is one."""
    if strike not in ("rank", "agent"):
        return launcher.pid
    modules = ("trainctl.train",) if strike == "rank" else ("trainctl.launchers.agent",)
    return wait(lambda: next((p for p in live_processes(run) if module_of(p) in modules), None))


def wait(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def strike(name, launcher, run):
    """Strike, and expect the exit code, no traceback, and that nothing is left."""
    number, code = STRIKES[name]
    os.kill(target(name, launcher, run), number)
    found, out, err = finish(launcher, timeout=20)
    assert found == code, out + err
    assert "Traceback" not in out + err
    wait(lambda: not live_processes(run), seconds=5)
    return err


def test_interrupted_and_terminated_while_training(tmp_path, launcher, preloaded_server):
    """Kills of ranks, the agent and the launcher in training are in `tests/faults`."""
    run = tmp_path / "run"
    wait(lambda: len(curve(run)) >= 12)
    said = strike("interrupt", launcher, run)
    first = curve(run)
    # The signal saves: nothing is lost.
    last = f"trainctl resume {run} continues from step {max(first)}: no step is lost"
    assert "SIGINT: saves after this step" in said or "for SIGINT" in said
    assert said.splitlines()[-1] == last
    again = start("resume", "run", cwd=tmp_path)
    try:
        wait(lambda: max(curve(run)) >= max(first) + 12)
        strike("terminate", again, run)
    finally:
        again.kill()
    second = curve(run)
    last = max(second) + 5
    stop = f"training.stop_after_steps={last}"
    trainctl("resume", "run", stop, cwd=tmp_path, **preloaded_server.environment)
    steps = curve(run)
    assert list(steps) == list(range(1, last + 1))
    for before in (first, second):  # what was done again came out the same
        assert {step: steps[step] for step in before} == before
    status = json.loads(RunPaths(run).status.read_text())
    assert status["state"] == "finished" and status["attempt"] == 3


@pytest.mark.parametrize(
    ("name", "after_seconds"),
    [("rank", 3.0), ("agent", 1.0), ("launcher", 0.0), ("interrupt", 1.0), ("terminate", 3.0)],
)
def test_struck_during_start_up(tmp_path, launcher, name, after_seconds):
    """`after_seconds` from the moment that the run directory's first attempt has its agent.

    Each of them once; more moments, with stand-in ranks: `tests/launchers/test_start_up.py`.
    """
    run = tmp_path / "run"
    wait(lambda: (run / "run.json").is_file() and live_processes(run))
    time.sleep(after_seconds)
    strike(name, launcher, run)
