"""Tests on real processes: forks, signals, `/proc`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainctl.runs.processes import (
    RunTag,
    die_with_parent,
    is_alive,
    processes_of,
    terminate_processes,
)

SLEEP = "import time; time.sleep(60)"
IGNORE = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); " + SLEEP
FORK = (
    f"import os; me = os.getpid(); os.fork(); os.fork(); os.getpid() == me or os.setsid(); {SLEEP}"
)


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(
    started: list[subprocess.Popen[str]], tag: RunTag, code: str = SLEEP, **variables: str
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **tag.environment(), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    started.append(process)
    return process


def wait_until(condition, seconds: float = 10.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processes_are_found_by_id_directory_and_attempt(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag = RunTag("mine", tmp_path, 1)
    mine = start(started, tag)
    later = start(started, RunTag("mine", tmp_path, 2))
    start(started, RunTag("mine", tmp_path / "copy", 1))
    start(started, RunTag("mine-too", tmp_path, 1))
    start(started, RunTag("other", tmp_path, 1), NOTE="TRAINCTL_RUN_ID=mine")
    wait_until(lambda: processes_of(tag) == {mine.pid})
    assert processes_of(RunTag("mine", tmp_path)) == {mine.pid, later.pid}
    assert RunTag.from_environment(tag.environment()) == tag


def test_a_sweep_ends_forks_in_other_sessions_and_no_other_run(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag, other = RunTag("mine", tmp_path, 1), RunTag("other", tmp_path, 1)
    start(started, tag, FORK)
    bystander = start(started, other)
    wait_until(lambda: len(processes_of(tag)) == 4 and processes_of(other))
    assert terminate_processes(tag, grace_seconds=5) == set()
    assert not processes_of(tag)
    assert processes_of(other) == {bystander.pid}


def test_sigterm_first_and_sigkill_after_the_grace(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag = RunTag("mine", tmp_path, 1)
    gentle, stubborn = start(started, tag), start(started, tag, IGNORE)
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    wait_until(lambda: len(processes_of(tag)) == 2)
    start_time = time.monotonic()
    assert terminate_processes(tag, grace_seconds=0.7) == set()
    assert 0.7 <= time.monotonic() - start_time < 2.5
    assert (gentle.wait(), stubborn.wait()) == (-signal.SIGTERM, -signal.SIGKILL)


def test_termination_spares_the_listed_processes(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag = RunTag("mine", tmp_path, 1)
    kept, ended = start(started, tag), start(started, tag)
    wait_until(lambda: len(processes_of(tag)) == 2)
    assert terminate_processes(tag, grace_seconds=1, keep={kept.pid}) == set()
    assert (kept.poll(), ended.wait()) == (None, -signal.SIGTERM)


def test_a_sweep_catches_up_with_a_process_that_keeps_forking(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag = RunTag("mine", tmp_path, 1)
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "end = time.time() + 20\n"
        "while time.time() < end:\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    time.sleep(0.01)\n"
    )
    start(started, tag, code)
    wait_until(lambda: len(processes_of(tag)) > 5)
    assert terminate_processes(tag, grace_seconds=0.2) == set()
    time.sleep(0.2)
    assert not processes_of(tag)


def test_a_child_dies_with_its_parent_and_one_that_comes_late_ends_at_once(
    started: list[subprocess.Popen[str]], tmp_path: Path
) -> None:
    tag = RunTag("mine", tmp_path, 1)
    code = (
        "import os, subprocess, sys, time\n"
        "child = 'from trainctl.runs.processes import die_with_parent; die_with_parent();'\n"
        "child += 'print(flush=True); import time; time.sleep(60)'\n"
        "os.environ['TRAINCTL_PARENT_PID'] = str(os.getpid())\n"
        "subprocess.Popen([sys.executable, '-c', child])\n"
        "time.sleep(60)\n"
    )
    parent = start(started, tag, code)
    assert parent.stdout is not None
    parent.stdout.readline()
    assert len(processes_of(tag)) == 2
    parent.kill()
    wait_until(lambda: not processes_of(tag), seconds=2)

    late = start(started, tag, "from trainctl.runs.processes import die_with_parent as d; d(1)")
    assert late.wait() == 137
    assert "process 1, which started this one, is gone" in late.communicate()[1]


def test_a_rank_started_by_hand_has_no_parent_to_die_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINCTL_PARENT_PID", raising=False)
    die_with_parent()


def test_a_zombie_is_not_alive(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(started, RunTag("mine", tmp_path, 1))
    assert is_alive(process.pid)
    process.kill()
    wait_until(lambda: not is_alive(process.pid))
    process.wait()
    assert not is_alive(process.pid)
