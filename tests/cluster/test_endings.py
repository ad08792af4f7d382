"""Launches over real hosts whose ranks, agents, nodes or launcher end: nothing is left on any."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hosts import Cluster, inner, wait
from supervised import REPOSITORY, make_plan

from trainctl.config.codec import to_plain
from trainctl.runs.directory import create_run
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.runs.status import State, read_status

pytestmark = pytest.mark.cluster


class Launch:
    """A launch of stand-in ranks from the cluster's first host."""

    def __init__(self, cluster: Cluster, folder: Path, behaviour: str, **launcher: Any) -> None:
        plan = make_plan(
            4,
            **{
                "kind": "ssh",
                "hosts": ["n1", "n2"],
                "port": None,
                "ssh_config": str(cluster.settings),
                "node_timeout_seconds": 6.0,
                **launcher,
            },
        )
        plan = replace(plan, hardware=replace(plan.hardware, nodes=2, devices_per_node=2))
        plan.config.training.steps = plan.total_steps  # without it there is no plan for fewer nodes
        self.run = create_run(plan.config, root=folder, folder=folder)
        write_json(self.run.root / "plan_for_tests.json", to_plain(plan))
        driver = REPOSITORY / "tests/support/driver.py"
        self.process = cluster.start(
            sys.executable, driver, self.run.root, behaviour, cwd=REPOSITORY
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.events) if event["event"] == kind]

    def wait_for_step(self, step: int = 2) -> None:
        wait(self.process, lambda: len(self.events("step")) >= step)

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        talk = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode, talk


@pytest.fixture
def launch(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """Starts launches; none outlives the test."""
    started: list[Launch] = []

    def start(behaviour: str, **launcher: Any) -> Launch:
        started.append(Launch(cluster, tmp_path, behaviour, **launcher))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            os.kill(inner(each.process), signal.SIGKILL)
        each.process.communicate()
    for host in cluster.hosts:
        for pid in host.processes():
            os.kill(pid, signal.SIGKILL)


def rank(cluster: Cluster, number: int) -> int:
    """Return the pid of the stand-in rank with this RANK in its environment."""
    for host in cluster.nodes:
        for pid, line in host.processes().items():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if "stand_in.py" in line and f"RANK={number}".encode() in variables:
                return pid
    raise AssertionError(cluster.left())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_when_the_launcher_ends_nothing_is_left_on_any_host(
    cluster: Cluster, launch: Callable[..., Launch], number: signal.Signals
) -> None:
    running = launch("forever,child,stubborn", grace_seconds=1.0)
    running.wait_for_step()
    os.kill(inner(running.process), number)
    code, talk = running.end()
    assert code in (128 + number, -number), talk
    assert cluster.assert_clean(12.0) < 12.0
    status = read_status(running.run)
    assert status is not None and status.state is not State.running
    assert status.exit_code == (None if number is signal.SIGKILL else 128 + number)


def test_a_killed_rank_is_named_with_its_host_and_all_hosts_are_cleared(
    cluster: Cluster, launch: Callable[..., Launch]
) -> None:
    running = launch("forever,gloo,child")
    running.wait_for_step()
    os.kill(rank(cluster, 3), signal.SIGKILL)
    code, talk = running.end()
    assert code == 137, talk
    assert "rank 3 (node 1, n2, process" in talk and "was killed by SIGKILL" in talk
    cluster.assert_clean()


def test_an_agent_that_is_killed_takes_its_node_and_the_others_with_it(
    cluster: Cluster, launch: Callable[..., Launch]
) -> None:
    running = launch("forever,child")
    running.wait_for_step()
    (agent,) = [
        pid
        for pid, line in cluster.nodes[1].processes().items()
        if "trainctl.launchers.agent" in line
    ]
    os.kill(agent, signal.SIGKILL)
    code, talk = running.end()
    assert code == 137, talk
    assert "node 1 (n2): the agent on it was killed" in talk
    cluster.assert_clean()


def test_a_run_beside_it_is_left_alone(cluster: Cluster, launch: Callable[..., Launch]) -> None:
    """Two runs of one user on the same hosts: stopping one, by force too, leaves the other."""
    one = launch("forever", port=29511)
    other = launch("forever", port=29512)
    one.wait_for_step()
    other.wait_for_step()
    os.kill(inner(one.process), signal.SIGINT)
    assert one.end()[0] == 130
    seen = len(other.events("step"))
    other.wait_for_step(seen + 10)
    for host in cluster.nodes:
        of_one = [pid for pid in host.processes() if carries(pid, one.run)]
        assert not of_one and host.processes()
    os.kill(inner(other.process), signal.SIGINT)
    assert other.end()[0] == 130
    cluster.assert_clean()


def test_a_lost_node_is_waited_for_unless_fewer_nodes_are_allowed(
    cluster: Cluster, launch: Callable[..., Launch]
) -> None:
    """It comes back, and the run starts again on both."""
    running = launch("forever,gloo", max_restarts=1, node_wait_seconds=90.0, preflight_seconds=15.0)
    n2 = cluster.nodes[1]
    try:
        running.wait_for_step()
        n2.set_link("down")
        wait(running.process, lambda: running.events("waiting"))
        n2.set_link("up")
        (waiting,) = running.events("waiting")
        assert waiting["there"] == 1 and waiting["missing"] == ["n2"]
        wait(running.process, lambda: [e for e in running.events("step") if e["attempt"] == 2])
        assert [event["ranks"] for event in running.events("launch")] == [4, 4]
        os.kill(inner(running.process), signal.SIGINT)
        assert running.end()[0] == 130
    finally:
        n2.set_link("up")
    cluster.assert_clean()


def test_the_first_node_is_not_special_when_it_is_lost(
    cluster: Cluster, launch: Callable[..., Launch]
) -> None:
    """The rendezvous is lost with node 0: the other node's ranks end too, and the run goes on
    there.

    The remaining node becomes the first one. Losing it, with no restart left, ends the launch.
    """
    running = launch("forever,gloo,child", max_restarts=1, min_nodes=1, preflight_seconds=15.0)
    n1, n2 = cluster.nodes
    try:
        running.wait_for_step()
        n1.set_link("down")
        wait(running.process, lambda: [e for e in running.events("step") if e["attempt"] == 2])
        assert {attempt_of(pid) for pid in n2.processes()} == {"2"}
        cut_off = time.monotonic()
        while n1.processes():  # it does not train on alone
            assert time.monotonic() - cut_off < 40, n1.processes()
            time.sleep(0.1)
        (failure,) = [e for e in running.events("failure") if e["cause"] == "lost_node"]
        assert failure["node"] == 0 and "node 0 (n1): was lost" in failure["message"]
        (restart,) = running.events("restart")
        assert restart["nodes"] == 1 and "node 0 (n1): was lost" in restart["cause"]
        assert [event["ranks"] for event in running.events("launch")] == [4, 2]
        command = json.loads((running.run.root / "attempts/2/command.json").read_text())
        assert [node["host"] for node in command["nodes"]] == ["n2"]

        n2.set_link("down")
        code, talk = running.end()
        assert code == 6, talk
        assert "node 0 (n2): was lost" in talk
        cluster.assert_clean(20.0)  # the links are still down
    finally:
        n1.set_link("up")
        n2.set_link("up")


def attempt_of(pid: int) -> str | None:
    """Return the attempt number in the process's environment, if any."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    values = [
        v.partition(b"=")[2].decode() for v in variables if v.startswith(b"TRAINCTL_ATTEMPT=")
    ]
    return values[0] if values else None


def carries(pid: int, run: RunPaths) -> bool:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"TRAINCTL_RUN_DIR={run.root}".encode() in variables
