"""The agent's side of the process that ranks are forked from, with stand-ins for that process.

Real ones: `tests/e2e/test_forked_ranks.py`, and launches of tests that do without `preloaded`.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from trainctl.launchers.agent.ranks import ForkServer
from trainctl.runs.command import AttemptCommand
from trainctl.runs.processes import is_alive

FAILS = "import sys; sys.exit(3)"
FORKS_AND_FAILS = "print('[1, 2]', flush=True); import sys; sys.exit(3)"
IS_KILLED = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
HANGS = "import time; time.sleep(600)"
FORKS = """
import json, os, sys
for variables in json.loads(sys.stdin.readline()):
    if (pid := os.fork()) == 0:
        os._exit(int(variables['RANK']))
    print('[%d]' % pid, flush=True)
"""


def fork_server(program: str, patience_seconds: float = 60.0) -> ForkServer:
    ranks = (sys.executable, "-c", program)
    return ForkServer(
        AttemptCommand(nodes=(), ranks_per_node=1, rank_command=ranks), patience_seconds
    )


def fork(of: ForkServer, rank: int = 0) -> list[int] | None:
    return of.fork([{"RANK": str(rank)}], lambda: None)


def test_what_it_forks_are_children_of_the_agent() -> None:
    pids = fork(fork_server(FORKS), rank=7)
    assert pids is not None and len(pids) == 1
    _, status = os.waitpid(pids[0], 0)  # of a child only
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("program", [FAILS, FORKS_AND_FAILS])
def test_one_that_fails_leaves_it_to_the_ranks_to_say_why(program: str) -> None:
    assert fork(fork_server(program)) is None


def test_one_that_was_killed_stands_for_the_first_rank() -> None:
    killed = fork_server(IS_KILLED)
    pids = fork(killed)
    assert pids is not None
    _, status = os.waitpid(pids[0], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_one_that_hangs_is_ended() -> None:
    started = fork_server(HANGS, patience_seconds=0.2)
    pid = started._process.pid
    assert fork(started) is None
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_an_agent_that_is_to_end_does_not_wait_for_it() -> None:
    class Ending(BaseException):
        pass

    def end() -> None:
        raise Ending

    started = fork_server(HANGS)
    try:
        with pytest.raises(Ending):
            started.fork([{"RANK": "0"}], end)
    finally:
        started._process.kill()
        started._process.wait()
