"""A program of the user's that Slurm preempts: requeued, and gone on with by its own checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from commands import events, live_processes
from test_slurm import TWO_NODES, launch, preempt, wait_until

from trainctl.runs.layout import RunPaths
from trainctl.runs.status import State, read_status

pytestmark = pytest.mark.slurm

PROGRAM = """
import argparse, os, pathlib, signal, sys, time

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--local_rank")
parser.add_argument("--folder", type=pathlib.Path)
folder = parser.parse_args().folder
saved = folder / f"saved-{os.environ['RANK']}"
step = int(saved.read_text()) if saved.exists() else 0
print("from", step, flush=True)
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
while not asked and not (folder / "enough").exists():
    step += 1
    print("step", step, flush=True)
    time.sleep(0.2)
saved.write_text(str(step))
"""


def test_a_preempted_program_is_requeued_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    """It saves and exits with 0, as one does that was told to stop."""
    (tmp_path / "own.py").write_text(PROGRAM)
    run = tmp_path / "run"
    choices = ("script=own.py", "recipe=tiny", *TWO_NODES[-4:-1], "launcher.grace_seconds=30")
    job = launch(cluster, run, *choices, words=("--folder", str(tmp_path)))

    def said(attempt: int) -> list[str]:
        log = RunPaths(run).attempt(attempt).rank_log(0)
        return log.read_text().splitlines() if log.is_file() else []

    wait_until(lambda: "step 3" in said(1), "step", run)
    urgent = preempt(cluster)
    wait_until(lambda: read_status(RunPaths(run)).state is State.queued, "requeue", run)
    cluster.wait_for(urgent, "COMPLETED")
    wait_until(lambda: len(said(2)) > 1, "step after the requeue", run)
    last = int(said(1)[-1].split()[1])
    assert said(2)[:2] == [f"from {last}", f"step {last + 1}"]
    assert [event["attempt"] for event in events(run, "launch")] == [1, 2]

    (tmp_path / "enough").touch()
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED 0:0"
    assert not live_processes(run)
