"""Kills while a launch is still starting: no instant may leave a process behind."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from supervised import Launch, Launches

from trainctl.runs.lock import find_holder


@pytest.fixture
def launches(tmp_path: Path) -> Iterator[Launches]:
    """Real launches whose processes have imported nothing beforehand."""
    launches = Launches(tmp_path)
    yield launches
    launches.close()


def kill_launcher(launch: Launch) -> None:
    os.kill(launch.process.pid, signal.SIGKILL)


def kill_agent(launch: Launch) -> None:
    os.kill(launch.wait_for(launch.agent), signal.SIGKILL)


def kill_rank(launch: Launch) -> None:
    os.kill(launch.wait_for(lambda: launch.rank(1)), signal.SIGKILL)


def interrupt(launch: Launch) -> None:
    os.killpg(launch.process.pid, signal.SIGINT)


def terminate(launch: Launch) -> None:
    os.kill(launch.process.pid, signal.SIGTERM)


def check(launches: Launches, launch: Launch, strike: Callable[[Launch], None]) -> None:
    """Strike, expect a clean machine within five seconds, a failure's exit code, and a resume."""
    strike(launch)
    took = launch.seconds_to_clean(time.monotonic())
    code, talk = launch.end()
    assert code != 0, talk
    assert find_holder(launch.run) is None
    print(f"{strike.__name__}: clean after {took:.2f} s, exit {code}: {talk.splitlines()[:1]}")


# Seconds after the start of the launcher's process. Its agent is there after about 0.2, has torch
# after 1.3, and the ranks have it about a second later.
@pytest.mark.parametrize(
    ("strike", "seconds"),
    [
        (kill_launcher, 0.05),
        (kill_launcher, 1.5),
        (interrupt, 0.3),
        (interrupt, 2.5),
    ],
)
def test_the_launcher_is_struck_during_start_up(
    launches: Launches, strike: Callable[[Launch], None], seconds: float
) -> None:
    launch = launches.start("forever,gloo,child")
    time.sleep(seconds)
    check(launches, launch, strike)


@pytest.mark.parametrize("seconds", [0.0, pytest.param(2.2, marks=pytest.mark.slow)])
def test_the_agent_is_killed_during_start_up(launches: Launches, seconds: float) -> None:
    launch = launches.start("forever,gloo,child")
    launch.wait_for(launch.agent)
    time.sleep(seconds)
    check(launches, launch, kill_agent)


@pytest.mark.parametrize("seconds", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_a_rank_is_killed_during_start_up(launches: Launches, seconds: float) -> None:
    launch = launches.start("forever,gloo,child")
    launch.wait_for(lambda: launch.rank(1))
    time.sleep(seconds)
    check(launches, launch, kill_rank)
    (failure,) = launch.events("failure")
    assert (failure["rank"], failure["signal"]) == (1, "SIGKILL")


@pytest.mark.slow
def test_random_kills_of_one_run_and_then_it_ends_well(launches: Launches) -> None:
    draw = random.Random(34)  # each of them once, after 0.1 to 2.7 seconds
    run = launches.make_run()
    strikes = [kill_launcher, kill_agent, kill_rank, interrupt, terminate]
    for _ in strikes:
        launch = launches.start("forever,gloo,child", run=run)
        time.sleep(draw.uniform(0.0, 3.0))
        check(launches, launch, draw.choice(strikes))
    assert launches.start("steps", run=run).end(20)[0] == 0
