"""A launch and the processes that send its metrics: it never waits for them, nor fails for them."""

from __future__ import annotations

import csv
import json
import os
import signal
import time

import pytest
from supervised import Launch, Launches, carriers

from trainctl.runs.status import State

pytestmark = pytest.mark.usefixtures("own_options")


def sender(launch: Launch) -> int | None:
    """Pid of the process that sends to the logger."""
    pids = [
        pid for pid, line in carriers(launch.identity).items() if "trainctl.monitor.loggers" in line
    ]
    return pids[0] if pids else None


def steps(launch: Launch) -> list[int]:
    """Return the steps that have reached the logger."""
    path = launch.run.root / "table" / "train.csv"
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return [int(row["step"]) for row in csv.DictReader(stream)]


def check_end(launch: Launch) -> str:
    """It ended well and left nothing; what was said."""
    code, talk = launch.end(60)
    assert code == 0, talk
    assert launch.status().state is State.finished
    assert not carriers(launch.identity)
    return talk


def test_when_a_launch_ends_all_steps_have_been_sent(launches: Launches) -> None:
    launch = launches.start("steps", loggers=["table"])
    check_end(launch)
    assert steps(launch) == list(range(1, 11))
    assert not launch.events("logger")


def test_a_killed_sender_is_replaced_and_nothing_is_missing(launches: Launches) -> None:
    launch = launches.start("forever,obliging", loggers=["table"], interrupt_grace_seconds=30.0)
    launch.wait_for(lambda: steps(launch))
    first = sender(launch)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    launch.wait_for(lambda: sender(launch) not in (None, first))
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.end(60)[0] == 143
    assert steps(launch) == [event["step"] for event in launch.events("step")]
    assert not carriers(launch.identity)


def test_a_killed_launcher_leaves_no_sender(launches: Launches) -> None:
    launch = launches.start("forever", loggers=["table"])
    launch.wait_for(lambda: steps(launch))
    os.kill(launch.process.pid, signal.SIGKILL)
    launch.seconds_to_clean(time.monotonic())


@pytest.mark.slow
def test_a_sender_that_hangs_changes_neither_the_end_nor_its_code(launches: Launches) -> None:
    launch = launches.start("steps", loggers=["table"])
    os.kill(launch.wait_for(lambda: sender(launch)), signal.SIGSTOP)
    check_end(launch)
    (told,) = launch.events("logger")
    assert told["problem"] == "it had not sent everything when it was ended"


def test_a_signal_that_ends_the_run_at_once_does_not_wait_for_a_sender_that_hangs(
    launches: Launches,
) -> None:
    launch = launches.start("forever", loggers=["table"])
    launch.wait_for_step()
    os.kill(launch.wait_for(lambda: sender(launch)), signal.SIGSTOP)
    os.kill(launch.process.pid, signal.SIGTERM)
    signalled = time.time()
    assert launch.end(60)[0] == 143
    assert not carriers(launch.identity)
    (told,) = launch.events("logger")
    assert told["time"] - signalled < 10, "as after a run that ended well"


def test_a_logger_that_cannot_write_changes_neither_the_end_nor_its_code(
    launches: Launches,
) -> None:
    run = launches.make_run(loggers=["table"])
    (run.root / "table").write_text("a file where its folder should be")
    launch = launches.start("steps", run=run)
    check_end(launch)
    (told,) = launch.events("logger")
    cursor = json.loads(run.companion("table").cursor.read_text())
    assert told["name"] == "table" and told["problem"] == cursor["problem"] != ""
