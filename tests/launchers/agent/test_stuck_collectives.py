"""Ranks of real process groups hang; the collective and the ranks that are missing are named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from trainctl.launchers.agent.flight_records import RankState, find_stuck, rank_names
from trainctl.launchers.agent.hang_detection import HangDetector, HungRank
from trainctl.runs.failures import Cause, cause_of, log_tail
from trainctl.runs.files import write_json
from trainctl.runs.layout import AttemptPaths

PROGRAM = Path(__file__).parents[2] / "support" / "hanging_ranks.py"


class Hanging:
    """The ranks of all cases, which hang side by side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONPATH": str(PROGRAM.parents[2]),
        }
        self.process = subprocess.Popen([sys.executable, PROGRAM, folder], env=environment)

    def case(self, name: str) -> tuple[AttemptPaths, dict[int, int]]:
        """Return folder and pids by rank of a case, once its ranks hang."""
        attempt = AttemptPaths(self._folder / name, 1)
        deadline = time.monotonic() + 60
        while not (attempt.root / "pids.json").exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)
        pids = json.loads((attempt.root / "pids.json").read_text())
        return attempt, {int(rank): pid for rank, pid in pids.items()}

    def close(self) -> None:
        for path in self._folder.glob("*/pids.json"):
            for pid in json.loads(path.read_text()).values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    made = Hanging(tmp_path_factory.mktemp("hanging"))
    yield made
    made.close()


def detector(attempt: AttemptPaths, world_size: int, seconds: float = 0.5) -> HangDetector:
    return HangDetector(
        attempt, heartbeat_seconds=seconds, slow_phase_seconds=60.0, world_size=world_size
    )


def hung_rank(watch: HangDetector, pids: Mapping[int, int]) -> HungRank:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = watch.find_hung(pids)
        if found is not None:
            return found
        time.sleep(0.02)
    raise AssertionError("no rank counts as hung")


def line_of(code: str) -> str:
    lines = PROGRAM.read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip() == code]
    return f"({PROGRAM}:{number})"


def found_in(hanging: Hanging, case: str) -> tuple[HungRank, str]:
    attempt, pids = hanging.case(case)
    hung = hung_rank(detector(attempt, len(pids)), pids)
    assert hung.stuck is not None and hung.stuck.sequence == 3
    assert hung.message.endswith(f"(in step after step 2); {hung.stuck.sentence}")
    return hung, hung.stuck.sentence


AVERAGE = f"average {line_of('dist.all_reduce(torch.ones(size), group=group)')}"
BUSY = f"busy {line_of('time.sleep(60)')}"


def test_a_rank_that_skips_an_all_reduce(hanging: Hanging) -> None:
    hung, sentence = found_in(hanging, "skips")
    skips = f"skips {line_of('dist.broadcast(torch.ones(2, 3), 0, group=data)')}"
    assert sentence == (
        "collective 3 of the group data of ranks 0 to 2 is not the same on all: ranks 0 and 2 "
        f"called all_reduce of float32 [4], and rank 0 is in {AVERAGE}; rank 1 called broadcast "
        f"of float32 [2, 3], and is in {skips}"
    )
    assert (hung.rank, list(hung.stuck.elsewhere)) == (1, [1])
    assert "skips" in "".join(hung.details)


def test_a_rank_that_sleeps(hanging: Hanging) -> None:
    """Its node is another one, whose agent has not noticed anything yet."""
    attempt, pids = hanging.case("sleeps")
    other, is_over = detector(attempt, 2, seconds=60.0), threading.Event()

    def look() -> None:
        while not is_over.wait(0.1):
            assert other.find_hung({1: pids[1]}) is None

    thread = threading.Thread(target=look)
    thread.start()
    try:
        hung = hung_rank(detector(attempt, 2), {0: pids[0]})
    finally:
        is_over.set()
        thread.join()
    assert hung.stuck is not None
    assert hung.stuck.sentence == (
        "collective 3 of the group data of ranks 0 and 1, all_reduce of float32 [4], does not end: "
        f"rank 0 entered it by {AVERAGE}; rank 1 is in {BUSY}"
    )
    assert asdict(hung.stuck) | {"sentence": ""} == {
        "operation": "all_reduce",
        "types": ["float32"],
        "sizes": [[4]],
        "group": "data",
        "ranks": [0, 1],
        "sequence": 3,
        "entered": [0],
        "elsewhere": {1: f"is in {BUSY}"},
        "sentence": "",
    }


def test_a_rank_that_the_others_wait_for_in_turn(hanging: Hanging) -> None:
    attempt, pids = hanging.case("waits")
    hung = hung_rank(detector(attempt, 3), pids)
    assert hung.rank == 2 and hung.stuck is not None
    assert hung.stuck.sentence == (
        "collective 1 of ranks 1 and 2, all_reduce of float32 [4], does not end: "
        f"rank 1 entered it by {AVERAGE}; rank 2 is in {BUSY}"
    )


def test_a_peer_that_is_dead(hanging: Hanging) -> None:
    hung, sentence = found_in(hanging, "dead")
    assert hung.rank == 1
    assert sentence.endswith("; rank 1 does not answer: process state T (stopped)")
    assert hung.stuck is not None and hung.stuck.entered == [0]


def test_a_rank_with_another_shape(hanging: Hanging) -> None:
    """Gloo aborts the rank with the smaller tensor; the other one loses its connection."""
    attempt, _ = hanging.case("another_shape")
    deadline = time.monotonic() + 20
    while "Thread" not in attempt.rank_log(1).read_text() or not attempt.flight_record(0).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    stuck = find_stuck(detector(attempt, 2).ask_ranks({}))
    assert stuck is not None
    assert stuck.sentence == (
        "collective 3 of the group data of ranks 0 and 1, all_reduce of float32 [1000], does not "
        f"end: rank 0 entered it by {AVERAGE}; rank 1 is in {AVERAGE}"
    )
    log = log_tail(attempt.rank_log(1), lines=1000)
    assert cause_of(-signal.SIGABRT, "", log) is Cause.collective_mismatch


# ------------------------------------------------------------------------------ made-up records


def state(*calls: Mapping[str, Any], ranks: tuple[int, ...] = (0, 1)) -> RankState:
    plain = {"group": "g", "operation": "all_reduce", "types": ["float32"], "sizes": [[4]]}
    plain |= {"is_done": True, "is_main": True}
    groups = {"g": {"ranks": list(ranks), "description": "undefined"}}
    numbered = [{"sequence": number, **plain, **call} for number, call in enumerate(calls, 1)]
    return RankState({"groups": groups, "calls": numbered}, ['  File "a.py", line 3 in step'])


WAITS = {"is_done": False}


def test_two_shapes_of_an_all_reduce_are_not_the_same() -> None:
    """As NCCL leaves them, which waits."""
    stuck = find_stuck({0: state({}, WAITS), 1: state({}, WAITS | {"sizes": [[2, 3]]})})
    assert stuck is not None and stuck.elsewhere == {1: "is in step (a.py:3)"}
    assert "rank 0 called all_reduce of float32 [4]" in stuck.sentence
    assert "rank 1 called all_reduce of float32 [2, 3]" in stuck.sentence
    gathered = WAITS | {"operation": "all_gather"}  # whose parts may differ
    stuck = find_stuck({0: state(gathered), 1: state(gathered | {"sizes": [[2, 3]]})})
    assert stuck is not None and not stuck.elsewhere


def test_all_ranks_in_a_collective_point_at_the_network() -> None:
    stuck = find_stuck({0: state({}, WAITS), 1: state({}, WAITS)})
    assert stuck is not None and not stuck.elsewhere
    assert stuck.sentence.endswith("; no rank is missing: look at the network and the devices")


def test_without_a_record_or_a_wait_nothing_is_said() -> None:
    assert find_stuck({0: state({}, {}), 1: state({})}) is None
    assert find_stuck({0: RankState(None, ()), 1: RankState(None, ())}) is None


def test_a_record_without_a_stack_names_no_place() -> None:
    without = RankState(state({}, WAITS).record, [])
    stuck = find_stuck({0: without, 1: state({})})
    assert stuck is not None and "rank 0 entered it by an unknown place" in stuck.sentence


def test_a_rank_whose_call_has_just_failed_is_heard_again(tmp_path: Path) -> None:
    """Asked at that moment it answers that the call is done, as torch counts it."""
    attempt = AttemptPaths(tmp_path, 1)
    record = attempt.flight_record(0)
    record.parent.mkdir(parents=True)
    for_now, at_its_end = (state(call).record | {"stack": []} for call in ({}, WAITS))
    write_json(record, for_now)
    later = threading.Timer(0.3, write_json, (record, at_its_end))
    later.start()
    try:
        stuck = detector(attempt, 2).find_interrupted({0: os.getpid()})
    finally:
        later.join()
    assert stuck is not None and stuck.entered == [0]


def test_a_stack_is_looked_for_at_the_end_of_a_log(tmp_path: Path) -> None:
    attempt = AttemptPaths(tmp_path, 1)
    attempt.rank_log(0).parent.mkdir(parents=True)
    stack = 'Current thread 0x1 (most recent call first):\n  File "{}.py", line 3 in step\n'
    attempt.rank_log(0).write_text(stack.format("early") + "x" * (2 << 20) + "\n")
    attempt.rank_log(1).write_text("x" * (2 << 20) + "\n" + stack.format("late"))
    assert [each.stack for each in detector(attempt, 2).ask_ranks({}).values()] == [
        [],
        ['  File "late.py", line 3 in step'],
    ]


def test_ranks_in_words() -> None:
    assert rank_names([3]) == "rank 3"
    assert rank_names([0, 1, 2, 3, 5]) == "ranks 0 to 3 and 5"
    assert rank_names([0, 2, 3, 9]) == "ranks 0, 2, 3 and 9"
