"""DeepSpeed's builds, as torch's own lock shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from trainctl.hardware.builds import is_stale_lock
from trainctl.launchers.agent import guard
from trainctl.launchers.agent.guard import BuildWatch, terminate_with_builds
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import RunTag
from trainctl.runs.status import Heartbeat, Phase

Told = list[tuple[str, bool]]
"""Operators, and whether they were compiled already."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(guard, "_LOOK_SECONDS", 0.0)
    found = tmp_path / "torch_extensions" / "py311_cpu" / "cpu_adam"
    found.mkdir(parents=True)
    return found


def watch(told: Told, tmp_path: Path) -> BuildWatch:
    def on_build(operator: str, seconds: float | None) -> None:
        told.append((operator, seconds is not None))

    attempt = AttemptPaths(tmp_path, 1)
    return BuildWatch(attempt, ["cpu_adam", "async_io"], on_build)


def test_a_build_is_reported_once_when_it_begins_and_once_when_it_ends(
    folder: Path, tmp_path: Path
) -> None:
    told: Told = []
    watched = watch(told, tmp_path)
    watched.look()
    assert told == []
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    for _ in range(3):
        watched.look()
    assert told == [("cpu_adam", False)]
    (folder / "cpu_adam.so").touch()
    baton.release()
    for _ in range(3):
        watched.look()
    assert told == [("cpu_adam", False), ("cpu_adam", True)]


def test_an_existing_build_is_reported_only_if_it_is_recompiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Told = []
    watched = watch(told, tmp_path)
    (folder / "cpu_adam.so").touch()
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    watched.look()
    baton.release()
    watched.look()
    assert told == []
    monkeypatch.setattr(guard, "_CHECK_SECONDS", 0.0)
    assert baton.try_acquire()
    watched.look()
    time.sleep(0.01)
    watched.look()
    baton.release()
    assert told == [("cpu_adam", False)]


def test_one_that_failed_is_not_said_to_be_compiled(folder: Path, tmp_path: Path) -> None:
    told: Told = []
    watched = watch(told, tmp_path)
    baton = FileBaton(str(folder / "lock"))
    assert baton.try_acquire()
    watched.look()
    baton.release()
    watched.look()
    assert told == [("cpu_adam", False)]


def test_nobody_looks_once_training_has_begun(folder: Path, tmp_path: Path) -> None:
    told: Told = []
    watched = watch(told, tmp_path)
    beats = Heartbeat(AttemptPaths(tmp_path, 1).heartbeat(0))
    watched.look()
    beats.beat(Phase.step, 0)
    watched.look()
    assert FileBaton(str(folder / "lock")).try_acquire()
    watched.look()
    assert told == []


HOLD = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
print("held", flush=True)
time.sleep(100)
"""


def hold(lock: Path, **variables: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock of a build."""
    started = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None and started.stdout.readline() == "held\n"
    return started


def test_ranks_that_are_ended_while_they_build_leave_no_lock(folder: Path, tmp_path: Path) -> None:
    tag = RunTag("r", tmp_path, 1, 0)
    others = folder.with_name("async_io")
    others.mkdir()
    with hold(folder / "lock", **tag.environment()), hold(others / "lock") as another_run:
        try:
            assert not is_stale_lock(folder / "lock")
            terminate_with_builds(tag, grace_seconds=0)
            assert not (folder / "lock").exists()
            assert (others / "lock").exists() and not is_stale_lock(others / "lock")
        finally:
            another_run.kill()
    assert is_stale_lock(others / "lock")  # a second old, and its builder was killed
