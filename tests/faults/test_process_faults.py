"""`kill -9` of every process of a run, one that stops answering, and requests to stop.

The faults of a test strike one run in turn, each after the resume from the one before: at its end
every loss has to be that of the run that nothing happened to.
"""

import os
import signal
import socket
import time

import pytest
from struck import CONFIG, SAVES_EVERY

from trainctl.runs.status import Phase, read_beat

pytestmark = pytest.mark.slow


def test_a_port_that_is_taken_stays_taken(struck):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        typed = (f"launcher.port={port}", "launcher.max_restarts=3")
        launcher = struck.launch(*CONFIG, *typed, **struck.preloaded)
        struck.finish(launcher, 4, f"launcher.port={port} on 127.0.0.1: Address already in use")
    assert not struck.events("restart")


def test_kill_9_of_the_agent_and_of_the_launcher(struck, undisturbed):
    """Of a rank: `test_soak.py`, and in `test_save_faults.py` without restarts."""
    launcher = struck.launch(*CONFIG)
    struck.wait_for_step(25)
    agent = struck.agent()
    os.kill(agent, signal.SIGKILL)
    struck.finish(launcher, 137, f"the agent (node 0, process {agent}) was killed by SIGKILL")
    assert struck.saved[-1] in (10, 20, 30, 40), "what was committed by then"

    launcher = struck.launch()
    struck.wait_for_step(60)
    os.kill(launcher.pid, signal.SIGKILL)
    struck.finish(launcher, -signal.SIGKILL)
    assert struck.status()["message"] == (
        f"the launcher (process {launcher.pid}) ended without stopping this attempt"
    )
    struck.complete(undisturbed)
    assert [event["attempt"] for event in struck.events("start")] == [1, 2, 3]


def is_between_saves(struck):
    """Whether the rank is in a step that no save follows: in a save it may be silent for longer."""
    beat = read_beat(struck.paths.attempt(1).heartbeat(1))
    return beat is not None and beat.phase is Phase.step and beat.step % SAVES_EVERY in range(1, 6)


def test_a_stopped_rank_needs_nobody_where_restarts_are_allowed(struck, undisturbed):
    """Nor does a killed one: `test_soak.py`."""
    launcher = struck.launch(*CONFIG, "launcher.max_restarts=2", "launcher.heartbeat_seconds=3")
    struck.wait_for_step(15)
    rank = struck.rank(1)
    struck.wait(lambda: is_between_saves(struck))
    os.kill(rank, signal.SIGSTOP)
    stopped = time.time()
    said = ("rank 1", "is hung", "does not end: rank 0 entered it by", "restart 1 of 2")
    said += ("rank 1 does not answer: process state T (stopped)",)
    struck.finish(launcher, 0, *said)
    (hung,) = struck.events("failure")
    assert (hung["rank"], hung["cause"]) == (1, "hung")
    assert 3 <= hung["time"] - stopped < 15
    stuck = hung["collective"]
    assert (stuck["entered"], list(stuck["elsewhere"])) == ([0], ["1"]), "of the real ranks"
    stacks = struck.paths.attempt(1).rank_log(0).read_text()
    assert "(most recent call first)" in stacks and "distributed_c10d.py" in stacks
    assert struck.curve == undisturbed
    assert struck.status()["attempt"] == 2
    again = {event["attempt"]: event["time"] for event in reversed(struck.events("step"))}
    print(
        f"hung rank: found after {hung['time'] - stopped:.1f} s, "
        f"training again {again[2] - hung['time']:.1f} s later"
    )


def test_sigterm_with_grace_saves_and_is_requeued(struck, undisturbed):
    # Ranks stop by a request, not by the signal.
    launcher = struck.launch(*CONFIG, "launcher.stop_grace_seconds=60", **struck.preloaded)
    struck.wait_for_step(15)
    os.kill(launcher.pid, signal.SIGTERM)
    asked = time.monotonic()
    struck.finish(launcher, 75, "saved and stopped after step", "for SIGTERM")
    print(f"SIGTERM with grace: gone after {time.monotonic() - asked:.1f} s")
    assert struck.saved[-1] == struck.steps_done, "no step is lost"
    assert struck.status()["state"] == "stopped"
    assert struck.events("end")[-1]["reason"] == "stop_requested"
    assert not list(struck.paths.requests.iterdir())

    # The limit is over when the ranks are up: one step, a save, the code for the scheduler.
    done = struck.steps_done
    launcher = struck.launch("training.time_limit_minutes=0.005", **struck.preloaded)
    said = struck.finish(launcher, 75, "the time limit")
    assert struck.saved[-1] == struck.steps_done == done + 1, said

    # A second SIGTERM, and a grace that ends: tests/launchers/test_supervise.py, with stand-ins.
    struck.complete(undisturbed, "training.time_limit_minutes=null")
