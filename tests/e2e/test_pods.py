"""Tests of a run's pods as two local processes: the cluster is missing, everything else is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import TINY, curve, events, live_processes
from ports import reserved_port

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.command import read_command
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import State, read_status

HOSTILE = "$(touch pwned) `touch pwned` 'q\" ;touch pwned"
OVERRIDES = (
    *TINY,
    "hardware=2x1xcpu",
    "launcher=kubernetes",
    f"launcher.kubernetes_python={sys.executable}",
    "training.evaluation_samples=0",
    "training.steps=1000000",
)


def start_pods(run: RunPaths, port: int) -> list[subprocess.Popen[str]]:
    """Both pods, the first one last: the other has to wait for it."""
    pods = []
    for node in (1, 0):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRAINCTL_NODE": str(node),
            "TRAINCTL_RENDEZVOUS": f"127.0.0.1:{port}",
        }
        command = [sys.executable, "-m", "trainctl.launchers.pod", str(run.root), "--attempt", "1"]
        pods.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
    return pods


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_pods_train_save_when_one_is_evicted_and_go_on(tmp_path: Path) -> None:
    """The run's folder and a variable contain text that a shell would execute."""
    config = compose(
        [
            *OVERRIDES,
            f"launcher.environment={{HOSTILE: {json.dumps(HOSTILE)}}}",
            "launcher.plain_environment=[HOSTILE]",
        ]
    ).config
    run = create_run(config, run_dir=tmp_path / HOSTILE)
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    new_attempt(run, plan)
    for _ in range(2):
        with reserved_port() as port:
            pods = start_pods(run, port)
            try:
                deadline = time.monotonic() + 150
                seen = max(curve(run.root), default=0)
                while max(curve(run.root), default=0) <= seen + 1:
                    assert time.monotonic() < deadline and all(pod.poll() is None for pod in pods)
                    time.sleep(0.2)
                # An eviction: SIGTERM to the pod's first process, here the second node's agent.
                pods[0].send_signal(signal.SIGTERM)
                assert pods[1].wait(120) == 75, pods[1].communicate()[0]
                # Both pods are on one machine here: the first one, at its end, may sweep the other.
                assert pods[0].wait(120) in (0, 128 + signal.SIGTERM)
            finally:
                for pod in pods:
                    pod.kill()
                    pod.communicate()
        status = read_status(run)
        assert status is not None and (status.state, status.exit_code) == (State.stopped, 75)
        assert not live_processes(run.root)
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()
    for node in read_command(run.attempt(2)).nodes:
        assert node.environment["HOSTILE"] == HOSTILE
    assert [event["attempt"] for event in events(run.root, "launch")] == [1, 2]
    saved = events(run.root, "end")[0]["step"]
    assert events(run.root, "start")[1]["resumed_from"].endswith(f"step-{saved:08}")
