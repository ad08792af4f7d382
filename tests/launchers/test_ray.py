"""Runs on a real Ray of two nodes: trained, a node lost, stopped, cancelled while they wait."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import ray
from commands import TINY, events, live_processes, trainctl
from ports import reserved_port
from preloaded_server import PreloadedServer

from trainctl.config.compose import compose
from trainctl.data.executors.ray import notify_if_no_cpu_is_free
from trainctl.errors import TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.launchers import ray as ray_launcher
from trainctl.launchers.interface import AttemptRequest, cancel, job_state
from trainctl.launchers.ray_agents import NodeActor
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.runs.status import SchedulerJob, read_job, read_status

RUN = RunPaths(Path("/data/runs/a 'run'"))


@cache
def make_plan(*overrides: str) -> RunPlan:
    config = compose(["recipe=tiny", "hardware=2x2xcpu", "launcher=ray", *overrides]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return plan


def rendered(plan: RunPlan, **environment: str) -> Any:
    return ray_launcher.render(
        AttemptRequest(plan=plan, run=RUN, attempt=RUN.attempt(1), environment=environment, cores=8)
    )


def test_a_job_has_no_secret_and_what_is_shown_is_submitted() -> None:
    plan = make_plan(
        "launcher.address=http://head:8265",
        "launcher.cpus_per_node=6",
        "launcher.environment.HF_TOKEN='${oc.env:HF_TOKEN}'",
        "launcher.forward_environment=[NCCL_*,SOME_KEY]",
        "launcher.python=/opt/python",
    )
    found = rendered(plan, HF_TOKEN="canary", SOME_KEY="canary", NCCL_DEBUG="INFO")
    (argv,) = found.commands
    assert argv[:6] == ("ray", "job", "submit", "--address", "http://head:8265", "--no-wait")
    environment = json.loads(argv[7])
    assert environment["py_executable"] == "/opt/python"
    assert environment["env_vars"]["NCCL_DEBUG"] == "INFO"
    # Graces of 120 and 3 s, and a margin: Ray itself would kill the launcher after 3 s.
    assert environment["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"] == "138"
    assert argv[8:10] == ("--", "exec") and argv[-3:] == (str(RUN.root), "--attempt", "1")
    assert "canary" not in shlex.join(argv)
    nodes = found.command.nodes
    assert [node.environment["OMP_NUM_THREADS"] for node in nodes] == ["3", "3"]
    assert [node.argv[-2:] for node in nodes] == [("--node", "0"), ("--node", "1")]


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("launcher.address=head:8265", "TC510"),
        ("launcher.address=http://127.0.0.1:9", "TC511"),
        ("launcher.resources={GPU: 1}", "TC512"),
        ("launcher.resources={memory: 1}", "TC512"),
        ("launcher.resources={spot: 0}", "TC512"),
        ("launcher.python='-c'", "TC160"),
    ],
)
def test_what_no_cluster_would_take_is_refused(override: str, rule: str) -> None:
    found = ray_launcher.check(make_plan(override), Path("/data/runs"), None)
    assert [finding.rule for finding in found] == [rule]


def test_errors_of_an_address_are_no_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502)

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        job = SchedulerJob(
            kind="ray", id=f"http://127.0.0.1:{server.server_port}/a", submitted=0.0, host="here"
        )
        with pytest.raises(TrainctlError, match="502"):
            job_state(job)
        server.shutdown()
    monkeypatch.setitem(sys.modules, "ray.exceptions", None)  # as on a machine without ray
    with pytest.raises(TrainctlError, match="ray is not installed"):
        cancel(job)


def test_an_agent_that_cannot_start_is_no_lost_node(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="not-shared"):
        NodeActor().run(["true"], {}, None, str(tmp_path / "not-shared" / "agent.log"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Ray of two nodes with one CPU each and a job server."""
    from ray.cluster_utils import Cluster

    with reserved_port() as port:
        pass
    node = {"num_cpus": 1, "object_store_memory": 80_000_000}
    quick = {"health_check_period_ms": 500, "health_check_failure_threshold": 3}
    head = {**node, "include_dashboard": True, "dashboard_port": port, "_system_config": quick}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        found.second = found.add_node(**node)
        found.jobs = f"http://{found.head_node.address_info['webui_url']}"
        yield found
    finally:
        found.shutdown()


def launch(cluster: Any, run: Path, *overrides: str) -> None:
    arguments = (*TINY, "launcher=ray", f"launcher.address={cluster.jobs}", *overrides)
    out = trainctl("launch", *arguments, "--run-dir", str(run), cwd=run.parent)
    assert "is submitted" in out


def wait_until(condition: Callable[[], object], what: str, run: Path, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        status = read_status(RunPaths(run))
        logs = [path.read_text()[-2000:] for path in run.glob("attempts/*/logs/*.log")]
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} in {seconds:.0f} s: {status}\n" + "\n".join(logs))
        time.sleep(0.2)


def steps(run: Path, attempt: int) -> list[int]:
    return [event["step"] for event in events(run, "step") if event["attempt"] == attempt]


@pytest.mark.slow
def test_a_run_loses_a_node_goes_on_with_the_other_and_stops(
    cluster: Any,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    preloaded_server: PreloadedServer,
) -> None:
    run, preloaded = tmp_path / "run", preloaded_server.environment
    launch(
        cluster,
        run,
        "hardware=2x1xcpu",
        "training.steps=1000000",
        "training.evaluation_samples=0",
        "checkpoint.every_steps=5",
        "launcher.max_restarts=1",
        "launcher.min_nodes=1",
    )
    wait_until(lambda: events(run, "checkpoint"), "checkpoint", run)
    said = trainctl("runs", "status", str(run), "--json", cwd=tmp_path, **preloaded)
    found = json.loads(said)
    assert (found["state"], found["job_state"], found["nodes"]) == ("running", "RUNNING", 2)

    with ray.init(cluster.address, log_to_driver=False):
        notify_if_no_cpu_is_free(ray)
    assert "placement groups hold all 2 CPUs" in capfd.readouterr().err

    cluster.remove_node(cluster.second, allow_graceful=False)
    wait_until(lambda: len(steps(run, 2)) > 2, "step on the node that is left", run)
    (restart,) = events(run, "restart")
    assert restart["nodes"] == 1 and steps(run, 2)[0] == restart["step"] + 1
    lost = [event for event in events(run, "failure") if event["cause"] == "lost_node"]
    assert [event["launch_exit_code"] for event in lost] == [6]

    assert "stopped" in trainctl("runs", "stop", str(run), cwd=tmp_path, **preloaded)
    assert read_status(RunPaths(run)).exit_code == 0
    job = read_job(RunPaths(run).attempt(1))
    wait_until(lambda: job_state(job) == "SUCCEEDED", "end of the job", run)
    logs = trainctl("runs", "logs", str(run), "--attempt", "1", cwd=tmp_path, **preloaded)
    assert "saved and stopped after step" in logs
    assert not live_processes(run)


@pytest.mark.slow
def test_a_killed_agent_fails_the_job_and_waiting_ones_are_cancelled_or_fail(
    cluster: Any, tmp_path: Path
) -> None:
    killed, waiting = tmp_path / "killed", tmp_path / "waiting"
    launch(cluster, killed, "hardware=1x1xcpu", "training.steps=1000000")
    # Two nodes are more than the cluster has by now.
    launch(cluster, waiting, "hardware=2x1xcpu")
    wait_until(lambda: events(killed, "step"), "step", killed)
    wait_until(lambda: events(waiting, "waiting"), "wait", waiting)
    (event,) = events(waiting, "waiting")
    assert (event["there"], event["of"], event["missing"]) == (1, 2, ["a node with 1 CPU free"])
    cancel(read_job(RunPaths(waiting).attempt(1)))

    (agent,) = agents(killed)
    os.kill(agent, signal.SIGKILL)
    wait_until(lambda: read_status(RunPaths(killed)).state.is_final, "end", killed)
    assert read_status(RunPaths(killed)).exit_code == 137
    (failure,) = read_events(killed / "events.jsonl", "failure")
    assert "the agent on it was killed" in failure["message"]
    wait_until(
        lambda: job_state(read_job(RunPaths(killed).attempt(1))) == "FAILED", "failed job", killed
    )
    wait_until(lambda: read_status(RunPaths(waiting)).state.is_final, "end", waiting)
    found = read_status(RunPaths(waiting))
    assert (found.state, found.exit_code) == ("stopped", 143)
    for run in (killed, waiting):
        wait_until(lambda run=run: not live_processes(run), "end of all processes", run)

    launch(cluster, lost := tmp_path / "lost", "hardware=2x1xcpu")
    wait_until(lambda: events(lost, "waiting"), "wait", lost)
    (lost / "attempts" / "1" / "logs").rmdir()  # as on a node without the run's storage
    cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    wait_until(lambda: read_status(RunPaths(lost)).state.is_final, "end", lost)
    found = read_status(RunPaths(lost))
    assert found.exit_code == 4 and "cannot start the agent" in found.message
    cancel(SchedulerJob(kind="ray", id=f"{cluster.jobs}/forgotten", submitted=0.0, host="here"))


def agents(run: Path) -> set[int]:
    """Return the agents of a run: they carry its tag, and are no children of one that does."""
    return {
        pid
        for pid in live_processes(run)
        if "trainctl.launchers.agent" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    }
