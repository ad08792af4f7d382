"""Runs on a real Slurm: launch, preemption, time limit, cancel, an allocation, an array."""

from __future__ import annotations

import json
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster
from commands import TINY, curve, events, finish, live_processes, start

from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import State, read_job, read_status

pytestmark = pytest.mark.slurm

TWO_NODES = (
    *TINY,
    "hardware=2x1xcpu",
    "launcher=slurm",
    "launcher.slurm_cpus_per_node=1",
    "training.evaluation_samples=0",
)
EXAMPLE = Path(__file__).parents[2] / "docs/examples/deepspeed_script.py"
ENDLESS = "training.steps=1000000"
HOSTILE = "a $(touch pwned) `touch pwned` 'q\" %j;#"


def trainctl(cluster: Cluster, *arguments: str, cwd: Path, code: int = 0) -> str:
    found, out, err = finish(start(*arguments, cwd=cwd, **cluster.environment))
    assert found == code, f"exit code {found}\n{out}\n{err}"
    return out + err


def launch(cluster: Cluster, run: Path, *overrides: str, words: tuple[str, ...] = ()) -> str:
    """Launch a run into a folder, a program of the user's with words of its own; the job's id."""
    own = ("--", *words) if words else ()
    trainctl(cluster, "launch", *overrides, "--run-dir", str(run), *own, cwd=run.parent)
    job = read_job(RunPaths(run).attempt(1))
    assert job is not None
    return job.id


def wait_until(happened: Callable[[], object], what: str, run: Path, seconds: float = 150) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            logs = [p.read_text()[-3000:] for p in sorted(run.rglob("*.log"))]
            raise AssertionError(f"no {what} in {seconds:.0f} s\n" + "\n".join(logs))
        time.sleep(0.2)


def preempt(cluster: Cluster) -> str:
    """Submit a job of higher priority that needs both nodes, and return its id."""
    command = ("sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null")
    return cluster.run(*command, "--wrap", "sleep 1").strip()


def test_scancel_saves_and_is_final_and_names_execute_nothing(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = tmp_path / HOSTILE
    value = 'launcher.environment.HOSTILE="$(touch pwned) \'x\' \\"\n;touch pwned"'
    plain = "launcher.plain_environment=[HOSTILE]"
    job = launch(cluster, run, *TWO_NODES, ENDLESS, value, plain)
    wait_until(lambda: len(curve(run)) > 1, "step", run)
    cluster.run("scancel", job)
    cluster.wait_for(job, "CANCELLED")
    wait_until(lambda: read_status(RunPaths(run)).state.is_final, "end", run, 30)
    status = read_status(RunPaths(run))
    assert (status.state, status.exit_code) == (State.stopped, 143)
    assert events(run, "checkpoint") and not live_processes(run)
    assert not list(tmp_path.rglob("pwned")) and not Path("pwned").exists()
    command = json.loads((run / "attempts" / "1" / "command.json").read_text())
    carried = command["nodes"][1]["environment"]["HOSTILE"]
    assert (
        carried
        == read_plan(run / "attempts" / "1" / "plan.json").config.launcher.environment["HOSTILE"]
    )
    assert "$(touch pwned)" in carried and "\n;touch pwned" in carried
    for bad in ("launcher.slurm_partition='x y'", "launcher.slurm_options=['--wrap=$(id)']"):
        talk = trainctl(cluster, "launch", *TWO_NODES, bad, cwd=tmp_path, code=2)
        assert "error[TC160]" in talk


def test_a_time_limit_saves_before_it_and_requeues(cluster: Cluster, tmp_path: Path) -> None:
    """Slurm's signal to the batch script alone; sent by hand, since limits are whole minutes."""
    run = tmp_path / "r"
    job = launch(cluster, run, *TWO_NODES, ENDLESS, "launcher.slurm_time_minutes=5")
    script = (run / "attempts" / "1" / "job.sh").read_text()
    assert "#SBATCH --time=5\n" in script and "#SBATCH --signal=B:TERM@135\n" in script
    wait_until(lambda: curve(run), "step", run)
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: len(events(run, "launch")) > 1, "second attempt", run)
    assert events(run, "end")[0]["reason"] == "stop_requested"
    trainctl(cluster, "runs", "stop", "r", "--now", cwd=tmp_path)
    assert cluster.wait_for(job, "FAILED", "COMPLETED") == "FAILED 143:0"
    assert not live_processes(run)


def test_failures_are_the_jobs_exit_code_inside_an_allocation_too(
    cluster: Cluster, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"launcher.port={taken.getsockname()[1]}"
        job = launch(cluster, tmp_path / "r", *TWO_NODES, port)
        assert cluster.wait_for(job, "FAILED", "COMPLETED") == "FAILED 4:0"
        status = read_status(RunPaths(tmp_path / "r"))
        assert status.exit_code == 4 and "Address already in use" in status.message
        assert "first failure" in trainctl(cluster, "runs", "logs", "r", cwd=tmp_path)
        inside = ("salloc", "-N2", "--ntasks-per-node=1", "-c1", "--immediate=30")
        command = f"{sys.executable} -m trainctl launch {' '.join(TWO_NODES)} {port}"
        talk = cluster.run(*inside, "sh", "-c", f"cd {tmp_path} && {command}", code=4)
        assert "Address already in use" in talk
    short = ("salloc", "-N1", "-c1", "--immediate=30", "sh", "-c", f"cd {tmp_path} && {command}")
    assert "has 1 nodes, and the plan is for 2" in cluster.run(*short, code=4)


def test_a_program_of_the_user_s_trains_fails_and_is_cancelled(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Words of its own arrive as they are typed; those of a shell execute nothing."""
    shutil.copy(EXAMPLE, tmp_path / "own.py")
    own = ("script=own.py", "recipe=tiny", *TWO_NODES[-4:-1])

    def run_own(name: str, *words: str) -> str:
        return launch(cluster, tmp_path / name, *own, words=words)

    job = run_own("run", "--steps", "3")
    # At its first use DeepSpeed compiles what a program's ranks talk through, for minutes.
    assert cluster.wait_for(job, "COMPLETED", "FAILED", seconds=400) == "COMPLETED 0:0"
    log = RunPaths(tmp_path / "run").attempt(1).rank_log(0)
    assert "step 3 of 3: loss" in log.read_text()
    assert "--signal" not in (tmp_path / "run" / "attempts" / "1" / "job.sh").read_text()

    job = run_own("failing", "--steps", HOSTILE)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED 6:0"
    failure = events(tmp_path / "failing", "failure")[0]
    assert failure["exit_code"] == 2
    assert f"invalid int value: {HOSTILE!r}" in failure["log_tail"][-1]
    assert not list(tmp_path.rglob("pwned"))

    # It reads no requests, so nobody waits for it to save.
    job = run_own("endless", "--steps", "1000000")
    log = RunPaths(tmp_path / "endless").attempt(1).rank_log(0)
    wait_until(lambda: log.is_file() and "step 2 " in log.read_text(), "step", tmp_path / "endless")
    cluster.run("scancel", job)
    ended = RunPaths(tmp_path / "endless")
    wait_until(lambda: read_status(ended).state.is_final, "end", ended.root, 30)
    assert (read_status(ended).state, read_status(ended).exit_code) == (State.stopped, 143)
    # What tells the loggers ends by itself when it has told them the end.
    wait_until(lambda: not live_processes(ended.root), "last process", ended.root, 15)


# From here on the ranks have imported all: how they end is seen above.


@pytest.mark.usefixtures("preloaded")
def test_a_preempted_run_saves_is_requeued_and_resumes(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "r"
    job = launch(cluster, run, *TWO_NODES, ENDLESS)
    wait_until(lambda: len(curve(run)) > 3, "step", run)
    listed = json.loads(trainctl(cluster, "runs", "ls", ".", "--json", cwd=tmp_path))["runs"]
    assert [(row["state"], row["job"], row["nodes"]) for row in listed] == [("running", job, 2)]

    urgent = preempt(cluster)
    wait_until(lambda: read_status(RunPaths(run)).state is State.queued, "requeue", run)
    cluster.wait_for(urgent, "COMPLETED")
    first = curve(run)
    saved = events(run, "end")[0]
    assert saved["reason"] == "stop_requested" and events(run, "preempted")
    wait_until(lambda: max(curve(run)) > max(first) + 2, "step after the requeue", run)
    assert [event["attempt"] for event in events(run, "launch")] == [1, 2]
    resumed = events(run, "start")[1]["resumed_from"]
    assert resumed and resumed.endswith(f"step-{saved['step']:08}")
    # The last step before and the first after it are neighbours: nothing was lost.
    steps = [event["step"] for event in events(run, "step") if event["attempt"] == 2]
    assert steps[0] == saved["step"] + 1

    assert "saved and stopped" in trainctl(cluster, "runs", "stop", "r", cwd=tmp_path)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED 0:0"
    assert not live_processes(run)


@pytest.mark.usefixtures("preloaded")
def test_a_sweep_is_an_array(cluster: Cluster, tmp_path: Path) -> None:
    # One node each, so that both tasks run at the same time.
    one = [text for text in TWO_NODES if not text.startswith("hardware=")]
    swept = ("hardware=1x1xcpu", "training.steps=2", "optimizer.lr=1e-4,1e-3")
    trainctl(cluster, "sweep", *one, *swept, "--sweep-dir", "s", cwd=tmp_path)
    jobs = [read_job(RunPaths(tmp_path / "s" / str(k)).attempt(1)).id for k in (0, 1)]
    assert jobs[0].endswith("_0") and jobs[1].endswith("_1")
    for job in jobs:
        assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED 0:0"
    rows = json.loads(trainctl(cluster, "sweep", "s", "--json", cwd=tmp_path))["runs"]
    assert [row["values"]["optimizer.lr"] for row in rows] == ["0.0001", "0.001"]
    assert [row["run"]["state"] for row in rows] == ["finished"] * 2
