"""Training across real hosts: the same losses, a node that is lost, and nothing left on any."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path

import pytest
from commands import TINY, curve, events
from hosts import Cluster, wait
from supervised import REPOSITORY

from trainctl.runs.layout import RunPaths

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


def test_a_program_of_the_user_s_trains_on_two_hosts_and_its_failure_is_reported(
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
    """The other node resumes the checkpoint with the same global batch and sample order."""
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
