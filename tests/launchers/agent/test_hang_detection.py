"""Real processes that go on, wait for one another, are busy, or were stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainctl.launchers.agent.hang_detection import HangDetector, HungRank, kernel_state
from trainctl.runs.layout import AttemptPaths

RANK = """
import faulthandler, signal, sys, time
from pathlib import Path
from trainctl.engines.flight_recorder import answer_requests
from trainctl.runs.status import Heartbeat, Phase
path, record, request, kind = *map(Path, sys.argv[1:4]), sys.argv[4]
if kind == "busy":  # as one whose native code keeps other threads from running
    faulthandler.register(signal.SIGUSR1, all_threads=True)
else:
    answer_requests(record, request)
heartbeat = Heartbeat(path)
if kind != "starting":
    heartbeat.beat(Phase.step, 7)
while kind == "lively":
    heartbeat.beat(Phase.step, 7)
    time.sleep(0.05)
def busy():
    time.sleep(60)
# As in a collective: the name of the file is what tells.
waiting = compile("def wait():\\n    time.sleep(60)\\n", "/env/distributed_c10d.py", "exec")
exec(waiting)
wait() if kind == "waiting" else busy()
"""

Start = Callable[..., dict[int, int]]


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptPaths:
    attempt = AttemptPaths(tmp_path, 1)
    attempt.logs.mkdir()
    return attempt


@pytest.fixture
def start(attempt: AttemptPaths) -> Iterator[Start]:
    """Start a rank of each kind; gives the pids by rank once all have beaten."""
    ranks: list[subprocess.Popen[bytes]] = []

    def start(*kinds: str) -> dict[int, int]:
        for rank, kind in enumerate(kinds):
            with attempt.rank_log(rank).open("wb") as log:
                paths = (attempt.heartbeat(rank), attempt.flight_record(rank))
                command = [sys.executable, "-c", RANK, *paths, attempt.flight_request, kind]
                ranks.append(subprocess.Popen(command, stdout=log, stderr=log))
        while not all(attempt.heartbeat(rank).exists() for rank in range(len(kinds))):
            time.sleep(0.01)
        time.sleep(0.3)
        return {rank: process.pid for rank, process in enumerate(ranks)}

    yield start
    for process in ranks:
        process.kill()
        process.wait()


def look(watch: HangDetector, pids: dict[int, int], seconds: float) -> HungRank | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        hung = watch.find_hung(pids)
        if hung is not None:
            return hung
        time.sleep(0.02)
    return None


def make_watch(attempt: AttemptPaths, slow: float = 60.0, world_size: int = 3) -> HangDetector:
    return HangDetector(
        attempt, heartbeat_seconds=1.0, slow_phase_seconds=slow, world_size=world_size
    )


def test_a_rank_that_beats_or_is_slow_to_start_is_left_alone(
    attempt: AttemptPaths, start: Start
) -> None:
    pids = start("lively", "starting")
    assert look(make_watch(attempt), pids, 2.5) is None
    hung = look(make_watch(attempt, slow=1.5, world_size=2), pids, 10)
    assert hung is not None and hung.rank == 1 and "in start after step 0" in hung.message


def test_the_one_that_does_not_answer_is_to_blame(attempt: AttemptPaths, start: Start) -> None:
    pids = start("waiting", "waiting", "waiting")
    os.kill(pids[2], signal.SIGSTOP)
    hung = look(make_watch(attempt), pids, 10)
    assert hung is not None and (hung.rank, hung.pid) == (2, pids[2])
    assert "in step after step 7" in hung.message
    assert "it does not answer: process state T (stopped)" in hung.message
    assert "distributed_c10d.py" in attempt.rank_log(0).read_text(), "the others told their stacks"


def test_the_one_that_does_not_wait_for_the_others_is_to_blame(
    attempt: AttemptPaths, start: Start
) -> None:
    hung = look(make_watch(attempt), start("waiting", "busy", "waiting"), 10)
    assert hung is not None and hung.rank == 1
    assert "in busy" in hung.message and "in busy" in hung.details[0]


def test_time_in_which_nobody_looked_does_not_count(attempt: AttemptPaths, start: Start) -> None:
    pids = start("waiting")
    watch = make_watch(attempt)
    assert watch.find_hung(pids) is None
    time.sleep(1.5)
    assert watch.find_hung(pids) is None


def test_the_kernels_account_of_a_process_that_is_gone() -> None:
    assert kernel_state(2**22 + 1) == ["process state unknown"]
    assert kernel_state(os.getpid())[0].startswith("process state R")
