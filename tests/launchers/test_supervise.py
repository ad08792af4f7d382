"""Real processes and real signals, once the ranks are training."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from supervised import Launches, carriers, make_plan

from trainctl.config.codec import to_plain
from trainctl.config.schema import OffloadConfig, OffloadDevice
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder
from trainctl.runs.status import State, read_status


def test_a_run_that_ends_well_leaves_nothing_and_exits_0(launches: Launches) -> None:
    launch = launches.start("steps,child")  # the ranks end well and leave children behind
    code, talk = launch.end()
    assert code == 0, talk
    assert not carriers(launch.identity)
    assert launch.status().state is State.finished
    assert [event["step"] for event in launch.events("step")] == list(range(1, 11))
    assert [event["ranks"] for event in launch.events("launch")] == [2]
    for rank in (0, 1):
        log = launch.run.attempt(1).rank_log(rank).read_text()
        assert log == f"rank {rank} of 2 is up\n"


@pytest.mark.slow
def test_what_a_rank_compiles_is_recorded(
    launches: Launches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions" / "py311_cpu"))
    run = launches.make_run(ranks=1)
    plan = make_plan(1)
    offload = OffloadConfig(optimizer=OffloadDevice.cpu)
    plan = replace(plan, config=replace(plan.config, offload=offload))
    write_json(run.root / "plan_for_tests.json", to_plain(plan))
    launch = launches.start("build,steps", run=run)
    assert launch.end(60.0)[0] == 0
    begun, ended = launch.events("build")
    assert begun["operator"] == ended["operator"] == "cpu_adam"
    assert begun["seconds"] is None and ended["seconds"] > 0
    assert begun["host"] == socket.gethostname()


def test_a_killed_rank_is_named_and_its_peers_and_children_end(launches: Launches) -> None:
    launch = launches.start("forever,gloo,child")
    launch.wait_for_step()
    rank = launch.rank(1)
    assert rank is not None
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    code, talk = launch.end()
    assert time.monotonic() - killed < 4.0  # 0.3 on a quiet machine
    launch.seconds_to_clean(killed)
    assert code == 137
    assert f"process {rank}) was killed by SIGKILL" in talk
    assert "rank 1 (node 0" in talk and "out of memory" in talk
    (failure,) = launch.events("failure")
    assert (failure["rank"], failure["signal"], failure["exit_code"]) == (1, "SIGKILL", None)
    assert failure["log_tail"] == ["rank 1 of 2 is up"]
    status = launch.status()
    assert (status.state, status.exit_code) == (State.failed, 137)
    assert status.message in talk


def test_a_run_whose_folder_is_renamed_ends_and_makes_no_other(launches: Launches) -> None:
    launch = launches.start("forever,gloo")
    launch.wait_for_step()
    root = launch.run.root
    moved = root.rename(root.with_name("elsewhere"))
    code, talk = launch.end(30)
    assert code == 5, talk
    assert f"{root} is not this run's folder any more: it was renamed to {moved}" in talk
    assert not root.exists() and not carriers(launch.identity)
    status = read_status(RunPaths(moved))
    assert status is not None and (status.state, status.exit_code) == (State.failed, 5)


def test_a_rank_that_raises_is_the_one_reported_although_its_peer_fails_too(
    launches: Launches,
) -> None:
    launch = launches.start("forever,gloo,raise")
    code, talk = launch.end(40)
    assert code == 6
    (failure,) = launch.events("failure")
    assert failure["rank"] == 1
    assert "ended with exit code 1: ValueError: the loss went through the roof" in talk
    assert "[rank1]: ValueError: the loss went through the roof" in failure["log_tail"]


def test_a_collective_with_another_shape_is_named_with_the_failure(launches: Launches) -> None:
    launch = launches.start("forever,gloo,shape")
    code, talk = launch.end(40)
    assert code == 128 + signal.SIGABRT
    (failure,) = launch.events("failure")
    assert (failure["rank"], failure["cause"]) == (1, "collective_mismatch")
    stuck = failure["collective"]
    assert (stuck["operation"], stuck["sequence"], stuck["entered"]) == ("all_reduce", 3, [0])
    assert "was killed by SIGABRT (ranks called different collectives); collective 3 of" in talk
    assert "rank 1 is in <module> (" in talk and f"{stuck['sentence']}" in failure["message"]


def test_a_crash_in_native_code_leaves_its_stack_in_the_log(launches: Launches) -> None:
    launch = launches.start("forever,segfault")
    code, talk = launch.end(40)
    assert code == 128 + signal.SIGSEGV
    assert "was killed by SIGSEGV" in talk
    assert "Fatal Python error: Segmentation fault" in talk


def test_ranks_that_ignore_sigterm_share_one_grace(launches: Launches) -> None:
    launch = launches.start("forever,stubborn,worker", ranks=4, grace_seconds=1.0)
    launch.wait_for_step()
    rank = launch.rank(3)
    assert rank is not None
    os.kill(rank, signal.SIGKILL)
    killed = time.monotonic()
    assert 1.0 <= launch.seconds_to_clean(killed) < 3.0  # not four graces
    assert launch.end()[0] == 137


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_every_rank(launches: Launches, number: int) -> None:
    launch = launches.start("forever,child")
    launch.wait_for_step()
    # As a terminal does it: the whole foreground process group gets the signal.
    os.killpg(launch.process.pid, number)
    signalled = time.monotonic()
    launch.seconds_to_clean(signalled)
    code, talk = launch.end()
    assert code == 128 + number
    assert f"stopped by {signal.Signals(number).name}" in talk
    status = launch.status()
    assert (status.state, status.exit_code) == (State.stopped, 128 + number)
    assert not launch.events("failure"), "a rank that was stopped has not failed"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_saves_and_keeps_its_exit_code(launches: Launches, number: int) -> None:
    launch = launches.start("forever,obliging", interrupt_grace_seconds=30.0)
    launch.wait_for_step(1)
    for _ in range(2):  # `timeout` sends to the program and to its group, a terminal twice
        os.killpg(launch.process.pid, number)
        time.sleep(0.001)
    code, talk = launch.end()
    assert code == 128 + number
    last = launch.events("step")[-1]["step"]
    assert f"saved and stopped after step {last} for {signal.Signals(number).name}" in talk
    assert (launch.status().state, launch.status().exit_code) == (State.stopped, 128 + number)
    (asked,) = launch.events("stopping")
    assert asked["within_seconds"] == 30 and not list(launch.run.requests.iterdir())


@pytest.mark.parametrize(
    ("grace", "number"),
    [
        ("interrupt_grace_seconds", signal.SIGINT),
        pytest.param("stop_grace_seconds", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_save_that_hangs_is_not_waited_for_longer_than_its_grace(
    launches: Launches, grace: str, number: signal.Signals
) -> None:
    launch = launches.start("forever", **{grace: 1.5})  # it follows no request
    launch.wait_for_step(1)
    begun = launch.run.checkpoints / ".step-00000009.tmp"
    begun.mkdir()
    os.kill(launch.process.pid, number)
    signalled = time.monotonic()
    time.sleep(1.0)
    os.kill(launch.process.pid, signal.SIGHUP)  # a terminal that closes hurries no save
    assert launch.seconds_to_clean(signalled) >= 1.4
    code, talk = launch.end()
    assert code == 128 + number and f"stopped by {number.name}" in talk
    assert not begun.exists(), "half a checkpoint is left"


@pytest.mark.parametrize(
    "grace", [pytest.param("interrupt_grace_seconds", marks=pytest.mark.slow), "stop_grace_seconds"]
)
def test_a_second_signal_does_not_wait_for_the_save(launches: Launches, grace: str) -> None:
    launch = launches.start("forever,worker,child", **{grace: 60.0})
    launch.wait_for_step(1)
    os.kill(launch.process.pid, signal.SIGTERM)
    time.sleep(0.5)
    assert launch.process.poll() is None
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.seconds_to_clean(time.monotonic())
    assert launch.end()[0] == 143


def test_a_signal_to_all_processes_at_once_is_no_failure(launches: Launches) -> None:
    launch = launches.start("forever,obliging", interrupt_grace_seconds=60.0)
    launch.wait_for_step(1)
    agent = launch.agent()
    assert agent is not None
    os.kill(launch.process.pid, signal.SIGSTOP)  # so that it finds the agent gone
    os.kill(launch.process.pid, signal.SIGTERM)
    os.kill(agent, signal.SIGTERM)
    time.sleep(1.0)
    os.kill(launch.process.pid, signal.SIGCONT)
    code, talk = launch.end()
    assert code == 143 and "stopped by SIGTERM" in talk
    assert not launch.events("failure")


def test_before_the_first_step_there_is_nothing_to_save(launches: Launches) -> None:
    launch = launches.start("forever,torch,obliging", interrupt_grace_seconds=60.0)
    launch.wait_for(launch.agent)
    os.kill(launch.process.pid, signal.SIGINT)
    launch.seconds_to_clean(time.monotonic())
    assert launch.end()[0] == 130
    assert not launch.events("stopping") and not launch.events("step")


def test_ranks_may_use_the_grace(launches: Launches) -> None:
    launch = launches.start("forever,slow_exit")
    launch.wait_for_step()
    os.kill(launch.process.pid, signal.SIGTERM)
    signalled = time.monotonic()
    assert launch.seconds_to_clean(signalled) >= 1.0
    assert launch.end()[0] == 143


def test_a_second_signal_does_not_wait_for_the_grace(launches: Launches) -> None:
    launch = launches.start("forever,stubborn,worker", grace_seconds=60.0)
    launch.wait_for_step()
    os.kill(launch.process.pid, signal.SIGINT)
    time.sleep(0.5)
    assert launch.process.poll() is None
    os.kill(launch.process.pid, signal.SIGINT)
    launch.seconds_to_clean(time.monotonic())
    assert launch.end()[0] == 130


def test_a_killed_agent_takes_its_ranks_along(launches: Launches) -> None:
    launch = launches.start("forever,torch,child,worker")
    launch.wait_for_step()
    agent = launch.agent()
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    launch.seconds_to_clean(time.monotonic())
    code, talk = launch.end()
    assert code == 137
    assert f"the agent (node 0, process {agent}) was killed by SIGKILL" in talk
    (failure,) = launch.events("failure")
    assert failure["rank"] is None


def test_a_killed_launcher_is_reported_by_its_agent_and_frees_the_run(launches: Launches) -> None:
    launch = launches.start("forever,child")
    launch.wait_for_step()
    os.kill(launch.process.pid, signal.SIGKILL)
    launch.seconds_to_clean(time.monotonic())
    # A dying process has no environment any more before it closes its files.
    deadline = time.monotonic() + 5
    while find_holder(launch.run) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert find_holder(launch.run) is None
    status = launch.status()
    assert status.state is State.failed
    assert status.message == (
        f"the launcher (process {launch.process.pid}) ended without stopping this attempt"
    )


def test_a_stopped_agent_is_killed_after_the_grace(launches: Launches) -> None:
    launch = launches.start("forever", grace_seconds=0.5)
    launch.wait_for_step()
    agent = launch.agent()
    assert agent is not None
    os.kill(agent, signal.SIGSTOP)
    os.kill(launch.process.pid, signal.SIGTERM)
    launch.seconds_to_clean(time.monotonic())
    assert launch.end()[0] == 143


def test_a_second_launch_is_refused_and_names_the_first(launches: Launches) -> None:
    first = launches.start("forever")
    first.wait_for_step()
    second = launches.start("forever", run=first.run)
    code, talk = second.end()
    assert code == 5
    assert f"in use by another launch: process {first.process.pid} on " in talk
    assert first.process.poll() is None and len(carriers(first.identity)) == 3


def test_a_resume_waits_until_the_agent_of_a_killed_launcher_has_cleaned_up(
    launches: Launches,
) -> None:
    first = launches.start("forever,worker", grace_seconds=2.0)  # the workers ignore SIGTERM
    first.wait_for_step()
    old = set(carriers(first.identity))
    os.kill(first.process.pid, signal.SIGKILL)
    second = launches.start("steps", run=first.run)
    assert second.end(20)[0] == 0
    assert not old & set(carriers(first.identity))
    starts = [event["time"] for event in second.events("launch")]
    orphaned = [event["time"] for event in second.events("failure")]
    assert starts[0] < orphaned[0] < starts[1], "the second began while the first was still there"


def test_launcher_and_agent_killed_at_once_and_the_next_launch_sweeps_the_rest(
    launches: Launches,
) -> None:
    first = launches.start("forever,child")
    first.wait_for_step()
    agent, ranks = first.agent(), [first.rank(0), first.rank(1)]
    assert agent is not None and None not in ranks
    os.kill(first.process.pid, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    os.kill(first.process.pid, signal.SIGKILL)
    time.sleep(0.5)
    left = set(carriers(first.identity))
    assert not left & set(ranks), "ranks die with the agent, by the kernel"
    second = launches.start("steps", run=first.run)
    assert second.end(20)[0] == 0
    assert not left & set(carriers(first.identity))


def test_two_runs_do_not_touch_each_other_even_if_one_is_a_copy(launches: Launches) -> None:
    original = launches.make_run()
    copy = RunPaths(original.root.with_name("copy"))
    shutil.copytree(original.root, copy.root)
    first, second = launches.start("forever", run=original), launches.start("forever", run=copy)
    first.wait_for_step()
    second.wait_for_step()
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.end()[0] == 143
    seen = len(second.events("step"))
    second.wait_for_step(seen + 5)
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.end()[0] == 143
    assert not carriers(first.identity)


def test_a_taken_port_is_reported_before_ranks_start(launches: Launches) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launch = launches.start("steps", port=port)
        code, talk = launch.end()
    assert code == 4
    assert f"launcher.port={port} on 127.0.0.1: Address already in use" in talk
    assert not list(launch.run.attempt(1).logs.glob("rank-*"))


def test_a_command_that_cannot_be_started_is_an_error_of_the_rank(launches: Launches) -> None:
    launch = launches.start("steps")
    path = launch.run.attempt(1).command
    launch.wait_for(path.is_file)
    command = json.loads(path.read_text())
    path.write_text(json.dumps({**command, "rank_command": ["/no/such/program"]}))
    code, talk = launch.end()
    assert code == 6
    assert "cannot start /no/such/program: No such file or directory" in talk
