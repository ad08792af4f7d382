"""A corpus prepared by array jobs of a real Slurm, and array tasks that fail."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
from cluster import Cluster
from executor_cases import contents, plant, prepare, statistics

from trainctl.data.executors import ExecutorTask, slurm
from trainctl.errors import ExitCode, TrainctlError

pytestmark = pytest.mark.slurm


def test_array_jobs_make_what_one_process_makes_and_name_what_failed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CONF", "PATH"):
        monkeypatch.setenv(name, cluster.environment[name])
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.2)
    plant(tmp_path / "texts")
    asked = ["data.executor=slurm", "launcher=slurm", "launcher.slurm_partition=low"]
    options = "data.executor_options=['--cpus-per-task=1']"
    alone = prepare(monkeypatch, tmp_path / "texts", tmp_path / "alone", workers=1)
    where = tmp_path / "100%"
    made = prepare(monkeypatch, tmp_path / "texts", where, *asked, options, workers=2)
    assert made == alone
    listed = cluster.run("squeue", "--states=all", "-h", "-r", "-o%P %j").splitlines()
    more = [line.split()[0] for line in listed if "trainctl-data-slurm-" in line]
    assert more.count("low") >= 8 and set(more) == {"low"}  # four steps of two tasks each
    assert prepare(monkeypatch, tmp_path / "texts", where, *asked, workers=2) == alone
    now = cluster.run("squeue", "--states=all", "-h", "-r", "-o%P %j").splitlines()
    assert set(now) <= set(listed)  # no other array; Slurm forgets old ones
    assert statistics(tmp_path / "texts", *asked) == statistics(tmp_path / "texts")

    monkeypatch.setattr(slurm, "PATIENCE_SECONDS", 0.5)
    executor = slurm.SlurmExecutor(workers=2)
    calls = {"good": partial(os.mkdir, tmp_path / "made"), "bad": partial(os._exit, 9)}
    finished: list[str] = []
    with pytest.raises(TrainctlError, match="process of bad ended with the tasks 1 of") as caught:
        executor.run(
            [ExecutorTask(name, call) for name, call in calls.items()],
            lambda task: finished.append(task.name),
        )
    assert caught.value.exit_code is ExitCode.environment
    assert (tmp_path / "made").exists() and finished == ["good"]
    assert "1.log" in caught.value.hint and "slurm-" in " ".join(contents(where))
    with pytest.raises(TrainctlError, match="FileExistsError"):
        executor.run([ExecutorTask("again", calls["good"])])
    kept = len(list(where.glob("slurm-*")))
    assert kept == 2  # their logs are named
    with pytest.raises(TrainctlError, match=r"sbatch failed: "):
        slurm.SlurmExecutor(("--partition=nowhere",)).run([ExecutorTask("a", print)])
    assert len(list(where.glob("slurm-*"))) == kept
