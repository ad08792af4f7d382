"""Ranks that fail or hang fail alone, and leave nothing behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fork_server import ForkServer, RanksFailed

from trainctl.runs.processes import is_alive

SEEN = []


def remember(value):
    """Add the value to this process's list; return the list, RANK and WORLD_SIZE."""
    SEEN.append(value)
    return SEEN, os.environ.get("RANK"), os.environ.get("WORLD_SIZE")


def die_on_the_second(number):
    """Kill rank 1 by the signal `number`; the other ranks wait for ever."""
    if os.environ["RANK"] == "1":
        print("my last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), number)
    wait_for_ever(None)


def raise_on_the_second(message):
    if os.environ["RANK"] == "1":
        raise ValueError(message)


def wait_for_ever(_):
    while True:
        time.sleep(1)


def refuse(_):
    raise ValueError("cannot be prepared")


def bind_the_port(_):
    """Whether the first rank can listen on the port of its world, and any other program take it."""
    address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
    with socket.socket() as other:
        try:
            other.bind(address)
            others_can = True
        except OSError:
            others_can = False
    with socket.create_server(address):  # with SO_REUSEADDR, as TCPStore
        return others_can


def start_server_and_wait(_):
    """Start a fork server inside a rank and wait for it, to be killed while the server has work."""
    with ForkServer((), {}) as inner:
        print(inner.pid, flush=True)
        inner.run("test_fork_server:wait_for_ever", None, 2, 60)


@pytest.fixture(scope="module")
def server():
    with ForkServer(("test_fork_server",), {}) as started:
        yield started
    assert not is_alive(started.pid)


def test_each_piece_of_work_has_fresh_processes(server):
    for value in "ab":
        results = server.run("test_fork_server:remember", value, 2, 60)
        assert results == [([value], "0", "2"), ([value], "1", "2")]


def test_a_failing_rank_is_shown_and_fails_alone(server):
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 failed:(?s:.*)ValueError: a test's"):
        server.run("test_fork_server:raise_on_the_second", "a test's", 2, 60)
    assert server.run("test_fork_server:remember", 1, 1, 60) == [([1], "0", "1")]


def test_a_killed_rank_takes_the_others_along(server):
    with pytest.raises(RanksFailed, match=r"rank 1 of 2 ended by SIGKILL:\nmy last words"):
        server.run("test_fork_server:die_on_the_second", signal.SIGKILL, 2, 60)
    assert children(server.pid) == []


def test_a_rank_that_hangs_shows_where(server):
    with pytest.raises(RanksFailed, match=r"not done after 0\.5 seconds:(?s:.*)wait_for_ever"):
        server.run("test_fork_server:wait_for_ever", None, 2, 0.5)
    assert children(server.pid) == []


def test_the_port_of_a_world_is_kept_for_it(server):
    assert server.run("test_fork_server:bind_the_port", None, 1, 60) == [False]


def test_what_is_prepared_is_in_every_rank(server):
    server.prepare("test_fork_server:remember", "before")
    server.prepare("test_fork_server:remember", "before")  # is not done again
    (result,) = server.run("test_fork_server:remember", "after", 1, 60)
    assert result[0] == ["before", "after"]


def test_a_server_that_fails_says_so():
    with ForkServer(("test_fork_server",), {}) as broken:
        with pytest.raises(RanksFailed, match="cannot be prepared"):
            broken.prepare("test_fork_server:refuse", None)
        until(lambda: not broken.is_alive)


def test_server_and_ranks_end_with_a_client_that_is_killed():
    client = subprocess.Popen(
        [sys.executable, "-c", "import test_fork_server as t; t.start_server_and_wait(None)"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(client.stdout.readline())
    until(lambda: len(children(pid)) == 2)
    ranks = children(pid)
    client.kill()
    client.communicate()
    until(lambda: not any(map(is_alive, [pid, *ranks])))


def children(pid):
    """Pids of its live children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if is_alive(child)]


def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
