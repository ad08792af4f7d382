"""Training across real hosts: the same losses, lost nodes, and nothing left on any of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import TINY, curve, events
from hosts import Cluster, inner
from supervised import REPOSITORY, make_plan

from trainctl.config.codec import to_plain
from trainctl.runs.atomic import write_json
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.runs.status import State, read_status

pytestmark = pytest.mark.cluster


def over_ssh(cluster: Cluster, hardware: str = "2x2xcpu") -> tuple[str, ...]:
    return (
        f"hardware={hardware}",
        "launcher=ssh",
        "launcher.hosts=[n1,n2]",
        f"launcher.ssh_config={cluster.settings}",
        "launcher.port=null",
    )


def test_two_hosts_train_as_one_does_and_carry_hostile_values(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Values with quotes, newlines and shell syntax arrive as they are, and execute nothing."""
    hostile = "$(touch PWNED); `touch PWNED` '\" \\ \n touch PWNED"
    plain = "$(touch PWNED); `touch PWNED` | touch PWNED"  # an override has no newlines
    folder = tmp_path / "a $(touch PWNED) 'folder'"
    folder.mkdir()
    cluster.trainctl(
        "launch", *TINY, *over_ssh(cluster), "training.steps=6",
        "--run-dir", folder / "run", f"+launcher.environment.GLOO_HOSTILE='{plain}'",

        cwd=folder, NCCL_HOSTILE=hostile,
    )  # fmt: skip
    cluster.assert_clean()
    run = folder / "run"
    command = json.loads((run / "attempts/1/command.json").read_text())
    assert [node["host"] for node in command["nodes"]] == ["n1", "n2"]
    for node in command["nodes"]:
        assert node["environment"]["NCCL_HOSTILE"] == hostile
        assert node["environment"]["GLOO_HOSTILE"] == plain
        assert node["environment"]["GLOO_SOCKET_IFNAME"] == "eth0"
    assert not list(tmp_path.rglob("PWNED")) and not list(cluster.folder.rglob("PWNED"))
    assert not (REPOSITORY / "PWNED").exists() and not Path("/root/PWNED").exists()

    cluster.trainctl(
        "launch", *TINY, "hardware=1xcpu", "training.steps=6", "--run-dir", tmp_path / "one",
        cwd=tmp_path,
    )  # fmt: skip
    here, there = curve(tmp_path / "one"), curve(run)
    assert list(there) == list(here) == list(range(1, 7))
    for step in here:
        assert there[step] == pytest.approx(here[step], rel=1e-5), step


def test_a_program_of_the_user_s_trains_on_two_hosts_and_its_failure_is_told(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Words of its own arrive as they are typed; those of a shell execute nothing."""
    shutil.copy(REPOSITORY / "docs/examples/deepspeed_script.py", tmp_path / "own.py")
    own = ("launch", "script=own.py", "recipe=tiny", *over_ssh(cluster, "2x1xcpu"))
    said = cluster.trainctl(*own, "--run-dir", "run", "--", "--steps", "3", cwd=tmp_path)
    cluster.assert_clean()
    assert "step 3 of 3: loss" in said
    attempt = RunPaths(tmp_path / "run").attempt(1)
    names = sorted(path.name for path in attempt.logs.glob("rank-*"))
    assert names == ["rank-0.log", "rank-1.log"]
    assert "Traceback" not in attempt.rank_log(1).read_text()

    hostile = "$(touch PWNED); touch PWNED"
    words = ("--run-dir", "failing", "--", "--steps", hostile)
    said = cluster.trainctl(*own, *words, cwd=tmp_path, code=6)
    cluster.assert_clean()
    failures = events(tmp_path / "failing", "failure")
    assert failures[0]["exit_code"] == 2 and failures[0]["host"] in ("n1", "n2")
    assert f"argument --steps: invalid int value: '{hostile}'" in said
    assert not list(tmp_path.rglob("PWNED")) and not list(cluster.folder.rglob("PWNED"))


def test_a_detached_run_is_listed_followed_and_stopped_by_its_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.trainctl(
        "launch", *TINY, *over_ssh(cluster, "2x1xcpu"), "training.steps=100000", "--detach",
        "--run-dir", tmp_path / "run",
        cwd=tmp_path,
    )  # fmt: skip
    run = tmp_path / "run"
    deadline = time.monotonic() + 120
    while not events(run, "step"):
        assert time.monotonic() < deadline, (run / "attempts/1/logs/launcher.log").read_text()
        time.sleep(0.2)
    (row,) = json.loads(cluster.trainctl("runs", "ls", ".", "--json", cwd=tmp_path))["runs"]
    assert (row["state"], row["launcher"], row["nodes"], row["ranks"]) == ("running", "ssh", 2, 2)
    logs = cluster.trainctl("runs", "logs", "run", cwd=tmp_path)
    assert "==> rank 0 on n1" in logs and "==> rank 1 on n2" in logs
    said = cluster.trainctl("runs", "stop", "run", cwd=tmp_path)
    assert "stopped, saved and stopped after step" in said
    assert events(run, "checkpoint")
    cluster.assert_clean()


def test_a_node_that_is_cut_off_is_left_behind_and_its_samples_are_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The other goes on with the same global batch and order of samples, from the checkpoint."""
    run = tmp_path / "run"
    launch = cluster.start(
        sys.executable, "-m", "trainctl", "launch", *TINY, *over_ssh(cluster, "2x1xcpu"),
        "training.steps=400", "training.stop_after_steps=60", "checkpoint.every_steps=8",
        "launcher.node_timeout_seconds=6", "launcher.max_restarts=2", "launcher.min_nodes=1",
        "launcher.slow_phase_seconds=120", "launcher.preflight_seconds=15", "--run-dir", run,
        cwd=tmp_path,
    )  # fmt: skip
    n2 = cluster.nodes[1]
    try:
        wait(launch, lambda: run.exists() and len(events(run, "step")) >= 10)
        n2.set_link("down")
        cut = time.monotonic()
        # A node that hears its launcher no more ends by itself.
        while n2.processes():
            assert time.monotonic() - cut < 40, n2.processes()
            time.sleep(0.1)
        out, err = launch.communicate(timeout=200)
        assert launch.returncode == 0, out + err
    finally:
        n2.set_link("up")
        launch.kill()
    cluster.assert_clean()
    (failure,) = [e for e in events(run, "failure") if e["cause"] == "lost_node"]
    assert failure["node"] == 1 and "node 1 (n2): was lost" in failure["message"]
    (restart,) = events(run, "restart")
    assert restart["nodes"] == 1 and "was lost" in out + err
    assert [event["ranks"] for event in events(run, "launch")] == [2, 1]
    steps = {event["step"]: event for event in events(run, "step")}
    assert sorted(steps) == list(range(1, 61))
    for step, event in steps.items():
        assert event["samples"] == [(step - 1) * 8, step * 8]
    # Steps that were done twice, on two nodes and on one, have the same loss.
    twice = [e for e in events(run, "step") if e["attempt"] == 1 and e["step"] > restart["step"]]
    assert twice
    for event in twice:
        assert steps[event["step"]]["attempt"] == 2
        assert steps[event["step"]]["loss"] == pytest.approx(event["loss"], rel=1e-4)


# ------------------------------------------------------------- with stand-ins for the ranks


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
    """The pid of a stand-in rank, by its environment."""
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
        pid for pid, line in cluster.nodes[1].processes().items() if "trainctl.agent" in line
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


def test_a_lost_node_without_the_others_leave_to_go_on_is_waited_for(
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
    """The rendezvous goes with it: the other's ranks end too, and the run goes on there alone.

    Its first node is then that one: losing it, with no restart left, ends the launch.
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
    """The number of the attempt that a process belongs to."""
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


def wait(
    process: subprocess.Popen[str], condition: Callable[[], Any], seconds: float = 120.0
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)
