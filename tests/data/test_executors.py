"""Executors give the same bytes, on one process, several, and a Ray cluster that loses a node."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from executor_cases import DOCUMENTS, contents, plant, prepare, statistics

from trainctl.data import executors
from trainctl.data.executors import ExecutorTask, require_results, slurm
from trainctl.data.executors.ray import RayExecutor
from trainctl.data.executors.slurm import SlurmExecutor, _write_calls, run_array_task
from trainctl.data.quality.columns import Columns, ColumnWriter
from trainctl.data.tasks import PreparationProgress
from trainctl.errors import ExitCode, TrainctlError


@pytest.mark.slow
def test_a_ray_cluster_that_loses_a_node_makes_what_one_process_makes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two nodes is killed while it has a task, and the other one does all that is left."""
    import ray
    from ray.cluster_utils import Cluster

    plant(tmp_path / "texts")
    alone = prepare(monkeypatch, tmp_path / "texts", tmp_path / "alone", workers=1)
    parts = [name for name in alone if name.endswith("part.json")]
    dropped = [name for name in alone if name.endswith("dropped.json")]
    assert len(parts) > 10 and len(dropped) == 2
    assert all(b'"near": {' in alone[name] and b'"exact": {' in alone[name] for name in dropped)
    two = prepare(monkeypatch, tmp_path / "texts", tmp_path / "two", workers=2)
    assert two == alone

    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "120")
    memory = 80 << 20
    head = {"num_cpus": 1, "object_store_memory": memory, "include_dashboard": False}
    cluster = Cluster(True, head_node_args=head)
    killed: list[str] = []
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=memory)
        raylet = node.all_processes["raylet"][0].process.pid

        def kill() -> None:
            while not (busy := tasks_below(raylet)):
                time.sleep(0.005)
            killed.extend(busy)
            cluster.remove_node(node, allow_graceful=False)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        address = f"data.executor_address={cluster.address}"
        where = tmp_path / "ray"
        asked = ["data.executor=ray", address]
        assert prepare(monkeypatch, tmp_path / "texts", where, *asked) == alone
        killer.join(1)
        assert len(killed) == 1
        assert statistics(tmp_path / "texts", *asked) == statistics(tmp_path / "texts")
        refused_by_ray(monkeypatch, tmp_path, asked)
        assert not ray.is_initialized()
        ray.init(cluster.address)  # as a user's program has it
        made = partial(os.mkdir, tmp_path / "made")
        RayExecutor(cluster.address).run([ExecutorTask("a", made)])
        assert ray.is_initialized() and (tmp_path / "made").exists()
        with pytest.raises(TrainctlError, match="is connected to the Ray cluster"):
            RayExecutor("127.0.0.1:1").run([ExecutorTask("a", print)])
    finally:
        ray.shutdown()
        cluster.shutdown()
    with pytest.raises(TrainctlError, match="no Ray cluster at ") as caught:
        RayExecutor("127.0.0.1:1").run([ExecutorTask("a", print)])
    assert caught.value.exit_code is ExitCode.environment


def tasks_below(raylet: int) -> list[str]:
    """Return the names of the tasks that workers of a raylet have, from their process titles."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            title = (folder / "cmdline").read_bytes().partition(b"\0")[0].decode()
            if parent == raylet and title.startswith("ray::"):
                found.append(title.removeprefix("ray::").strip())
    return [name for name in found if name != "IDLE" and not name.endswith("Agent")]


def refused_by_ray(monkeypatch: pytest.MonkeyPatch, folder: Path, asked: list[str]) -> None:
    """A user's mistake is reported as by one process, and nothing finished is done again."""
    shown: list[PreparationProgress] = []
    before = contents(folder / "ray")
    again = prepare(monkeypatch, folder / "texts", folder / "ray", *asked, progress=shown.append)
    assert again == before and not shown
    with (folder / "texts" / "one.jsonl").open("ab") as stream:
        stream.write(b'{"text": "\xff"}\n')
    said = []
    for overrides, workers in ((asked, None), ([], 1)):
        with pytest.raises(TrainctlError) as caught:
            prepare(monkeypatch, folder / "texts", folder / "bad", *overrides, workers=workers)
        said.append((caught.value.message, caught.value.hint, caught.value.exit_code))
    assert said[0] == said[1] and "byte 0xff is not UTF-8" in said[0][0]


def test_an_array_task_makes_only_the_calls_that_were_submitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache may be a folder that others can write to, and a pickle is code."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    (tmp_path / "other").mkdir()
    calls = [ExecutorTask("a", partial(os.mkdir, tmp_path / "made"))]
    digest = _write_calls(tmp_path / "array", [calls])
    raw = (tmp_path / "array" / "0.calls").read_bytes()
    for name, content in (
        ("0.calls", pickle.dumps([partial(os.rmdir, tmp_path / "other")])),
        ("calls.json", b'["0"]'),
    ):
        before = (tmp_path / "array" / name).read_bytes()
        (tmp_path / "array" / name).write_bytes(content)
        assert run_array_task(tmp_path / "array", digest) == ExitCode.run_state
        assert b"other calls than were submitted" in (tmp_path / "array" / "0.json").read_bytes()
        (tmp_path / "array" / name).write_bytes(before)
    assert (tmp_path / "other").exists() and not (tmp_path / "made").exists()
    assert (tmp_path / "array" / "0.calls").read_bytes() == raw
    assert run_array_task(tmp_path / "array", digest) == 0
    assert (tmp_path / "made").exists()
    assert (tmp_path / "array" / "0.done").read_text() == "0\n"
    assert run_array_task(tmp_path / "array", digest) == ExitCode.internal_error  # it exists


def test_sbatch_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path))
    with pytest.raises(TrainctlError, match="sbatch is not installed") as caught:
        SlurmExecutor().run([ExecutorTask("a", print)])
    assert caught.value.exit_code is ExitCode.environment
    SlurmExecutor().run([])
    assert not list(tmp_path.iterdir())


def test_an_array_job_is_asked_for_seldom_and_ended_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number may be that of another cluster. A job that is held is reported once."""
    monkeypatch.setenv("TRAINCTL_CACHE_DIR", str(tmp_path))
    commands: list[tuple[str, ...]] = []
    scripts: list[str] = []
    looks = iter(range(40))

    def run_tool(command: tuple[str, ...]) -> str:
        commands.append(command)
        if command[0] != "sbatch":
            return "PENDING JobHeldUser\n"
        scripts.append(next(Path(each).read_text() for each in command if each.endswith("job.sh")))
        return "7;other\n"

    def is_ended(array: object, number: int) -> bool:
        if next(looks, None) is None:
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(slurm, "run_tool", run_tool)
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(slurm._Array, "_is_ended", is_ended)
    with pytest.raises(KeyboardInterrupt):
        SlurmExecutor().run([ExecutorTask("a", print)])
    submitted, *asked, ended = commands
    (name,) = (each for each in submitted if each.startswith("--job-name="))
    assert ended == ("scancel", name.replace("job-name", "name"))
    assert [command[0] for command in asked] == ["squeue"] * 3
    assert capsys.readouterr().err.count("does not start by itself: JobHeldUser") == 1
    assert 'RAYON_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"' in scripts[0]


class RayTaskError(Exception):
    """Error of a task, as Ray raises it in the driver."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def test_what_ray_lacks_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """First the head, which then cancels nothing either; then trainctl on a node."""

    def lost(*_: object, **__: object) -> None:
        raise ConnectionError("the client\nwas disconnected")

    def failed(_: object) -> None:
        what = "The remote function failed to import on the worker:"
        raise RayTaskError(RuntimeError(f"{what}\n\nTraceback\nModuleNotFoundError: trainctl\n"))

    settings: dict[str, Any] = {}
    task = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: object()))
    fake = SimpleNamespace(
        **dict.fromkeys(("is_initialized", "cluster_resources", "shutdown"), dict),
        init=lambda _, **given: settings.update(given),
        remote=lambda **_: lambda _: task,
        util=SimpleNamespace(placement_group_table=dict),
        wait=lost,
        cancel=lost,
        get=failed,
    )
    raised = SimpleNamespace(RayError=RayTaskError, RayTaskError=RayTaskError)
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", raised)
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setattr("trainctl.data.executors.ray._require_listener", lambda address: None)
    for message in (
        "the Ray cluster at .*head:1 was lost: ConnectionError: the client was disconnected",
        "the process of a could not import trainctl: ModuleNotFoundError: trainctl",
    ):
        with pytest.raises(TrainctlError, match=message) as caught:
            RayExecutor("ray://head:1").run([ExecutorTask("a", print)])
        assert caught.value.exit_code is ExitCode.environment
        fake.wait = lambda found, **_: (found, [])
    assert settings["runtime_env"]["env_vars"]["RAYON_NUM_THREADS"] == "1"
    assert "the cluster has 0 CPUs, and a task takes 1" in capsys.readouterr().err


def test_a_result_that_appears_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS shows a missing name for a while after another machine has written it."""
    looks: list[str] = []

    def is_there(name: str) -> bool:
        looks.append(name)
        return name == "a" or len(looks) > 4

    monkeypatch.setattr(executors, "_POLL_SECONDS", 0.0)
    require_results(SlurmExecutor(), ["a", "b"], is_there, tmp_path)
    assert looks == ["a", "b", "b", "b", "b"]
    now = [0.0]

    def is_there_slowly(name: str) -> bool:
        """Of many names, the first look takes longer than the patience."""
        now[0] += 100.0 * (name == "a")
        return is_there(name)

    with monkeypatch.context() as clock:
        clock.setattr("trainctl.data.executors.time.monotonic", lambda: now[0])
        looks.clear()
        require_results(SlurmExecutor(), ["a", "b"], is_there_slowly, tmp_path)
    monkeypatch.setattr(executors, "PATIENCE_SECONDS", 0.0)
    with pytest.raises(TrainctlError, match=r"finished b, and .* does not have its result"):
        require_results(SlurmExecutor(), ["a", "b"], lambda name: name == "a", tmp_path)


def test_of_two_writers_of_a_part_the_first_counts(tmp_path: Path) -> None:
    """A reader has the files of the first one open; another content replaces them."""
    column = {"number": np.arange(3)}
    with (
        ColumnWriter(tmp_path / "part", "key") as late,
        ColumnWriter(tmp_path / "part", "key") as a,
    ):
        for writer in (a, late):
            writer.append(column)
        a.finish(of=1)
        inode = (tmp_path / "part").stat().st_ino
        late.finish(of=1)
    assert (tmp_path / "part").stat().st_ino == inode
    with ColumnWriter(tmp_path / "part", "key") as other:
        other.append(column)
        other.finish(of=2)
    assert Columns.load(tmp_path / "part").manifest["of"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["part"]


def test_the_corpus_has_the_copies_that_were_planted(tmp_path: Path) -> None:
    plant(tmp_path / "texts")
    lines = [(tmp_path / "texts" / f"{name}.jsonl").read_text() for name in ("one", "two")]
    texts = [line for text in lines for line in text.splitlines()]
    assert len(texts) == DOCUMENTS and 100 < len(texts) - len(set(texts)) < DOCUMENTS // 5
