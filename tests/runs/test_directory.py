from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainctl.config.derived import DerivedValue
from trainctl.config.schema import Accelerator, LauncherConfig, RunConfig
from trainctl.config.store import load_config
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware import Hardware
from trainctl.plans.types import Batch, Mesh, RunPlan
from trainctl.runs import directory
from trainctl.runs.directory import (
    create_run,
    is_run,
    last_attempt,
    new_attempt,
    newest_run,
    open_run,
    read_plan,
    read_record,
    remove_run,
    run_id,
)

PLAN = RunPlan(
    config=RunConfig(recipe="tiny"),
    hardware=Hardware(name="2xcpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=2),
    mesh=Mesh(data=2, tensor=1, pipeline=1, sequence=1),
    batch=Batch(
        global_batch_size=4, micro_batch_size=1, gradient_accumulation_steps=2, sequence_length=16
    ),
    total_steps=10,
    stop_step=5,
    warmup_steps=1,
    deepspeed={"train_batch_size": 4, "optimizer": {"params": {"lr": 3e-4}}},
    derived=(DerivedValue(key="total_steps", value=10, reason="as set"),),
    not_yet=("fp8",),
)


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def code_of(path: Path) -> tuple[ExitCode, str, str]:
    with pytest.raises(TrainctlError) as caught:
        open_run(path)
    return caught.value.exit_code, caught.value.message, caught.value.hint


def test_a_run_has_a_new_name_and_says_where_it_came_from() -> None:
    config = RunConfig(recipe="mine/7b zero3", launcher=LauncherConfig(omp_num_threads=3))
    argv = ("trainctl", "launch", "recipe=tiny", "launcher.environment.API_KEY=hush")
    runs = [create_run(config, argv=argv) for _ in range(3)]
    assert len({run.root for run in runs}) == 3 and len({run_id(run) for run in runs}) == 3
    run = runs[0]
    assert run.root.parent == Path("runs").resolve()
    assert run.root.name.startswith("mine-7b-zero3-20")
    assert load_config(run.config) == config
    record = read_record(run)
    assert record["argv"] == [*argv[:3], "launcher.environment.API_KEY=redacted"]
    assert record["packages"]["numpy"]
    assert record["git"] is None and not run.patch.exists()
    checkout = Path(__file__).parents[2]
    if (checkout / ".git").exists():  # a copy of the files has no revision
        told = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        assert record["trainctl"]["revision"] == subprocess.check_output(told, text=True).strip()
    assert newest_run().root == max(runs, key=lambda run: read_record(run)["created"]).root


def test_environment_is_recorded_by_allow_list_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("HF_TOKEN", "hush")
    monkeypatch.setenv("PYTHON_INDEX", "https://me:hush@example.org/simple")
    monkeypatch.setenv("MY_OWN", "hush")
    monkeypatch.setenv("WANTED", "yes")
    config = RunConfig(launcher=LauncherConfig(forward_environment=["WANTED"]))
    run = create_run(config)
    environment = read_record(run)["environment"]
    assert environment["NCCL_DEBUG"] == "INFO"
    assert environment["HF_TOKEN"] == "redacted"
    assert environment["PYTHON_INDEX"] == "https://redacted@example.org/simple"
    assert environment["WANTED"] == "yes"
    assert "hush" not in run.record.read_text()


def test_uncommitted_changes_are_kept_as_a_patch_that_applies(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        return subprocess.run(
            ["git", *identity, *arguments], cwd=project, check=True, capture_output=True, text=True
        ).stdout

    git("init", "--quiet", "--initial-branch", "main")
    (project / "train.py").write_text("lr = 1\n")
    git("add", ".")
    git("commit", "--quiet", "--message", "one")
    git("remote", "add", "origin", "https://me:hush@example.org/project.git")
    (project / "train.py").write_text("lr = 2\n")
    (project / "notes.txt").write_text("new\n")
    run = create_run(RunConfig(), folder=project)
    state = read_record(run)["git"]
    assert state["revision"] == git("rev-parse", "HEAD").strip()
    assert (state["branch"], state["changed"], state["untracked"]) == ("main", True, ["notes.txt"])
    assert state["remote"] == "https://redacted@example.org/project.git"
    git("checkout", "--quiet", "train.py")
    git("apply", str(run.patch))
    assert (project / "train.py").read_text() == "lr = 2\n"


def test_a_named_directory_is_taken_only_if_nothing_is_lost_by_it(tmp_path: Path) -> None:
    run = create_run(RunConfig(), run_dir=Path("here/deep"))
    assert run.root == tmp_path / "here/deep"
    with pytest.raises(TrainctlError) as caught:
        create_run(RunConfig(), run_dir=run.root)
    assert caught.value.exit_code is ExitCode.run_state
    assert f"trainctl resume {run.root}" in caught.value.hint

    other = tmp_path / "other"
    other.mkdir()
    assert create_run(RunConfig(), run_dir=other).root == other

    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").touch()
    with pytest.raises(TrainctlError, match=r"not a run: it holds thesis\.tex"):
        create_run(RunConfig(), run_dir=foreign)

    interrupted = tmp_path / "interrupted"
    interrupted.mkdir()
    (interrupted / "config.yaml").write_text("half")
    assert code_of(interrupted)[0] is ExitCode.run_state
    assert create_run(RunConfig(), run_dir=interrupted).root == interrupted

    (tmp_path / "file").touch()
    with pytest.raises(TrainctlError, match="cannot make the run directory"):
        create_run(RunConfig(), run_dir=tmp_path / "file")


def test_what_is_not_a_run_is_reported_with_the_runs_that_are_there(tmp_path: Path) -> None:
    code, message, hint = code_of(Path("runs/nothing"))
    assert code is ExitCode.run_state and "runs/nothing does not exist" in message
    with pytest.raises(TrainctlError, match="there is no run in runs"):
        newest_run()
    run = create_run(RunConfig())
    code, message, hint = code_of(Path("runs"))
    assert "no config.yaml and no run.json" in message
    assert run.root.name in hint
    assert run.root.name in code_of(Path("runs/typo"))[2]
    assert open_run(Path("runs") / run.root.name).root == run.root


def test_the_newest_run_is_the_one_made_last(monkeypatch: pytest.MonkeyPatch) -> None:
    first = create_run(RunConfig(recipe="z"))
    later = time.time() + 60
    monkeypatch.setattr(directory.time, "time", lambda: later)
    second = create_run(RunConfig(recipe="a"))
    damaged = create_run(RunConfig(recipe="x"))
    damaged.record.write_text("{")
    assert newest_run().root == second.root != first.root


def test_attempts_are_numbered_and_a_plan_is_read_back_as_it_was() -> None:
    run = create_run(PLAN.config)
    assert last_attempt(run) == 0
    attempts = [new_attempt(run, replace(PLAN, stop_step=step)) for step in (5, 10)]
    assert [attempt.number for attempt in attempts] == [1, 2] and last_attempt(run) == 2
    assert read_plan(attempts[0].plan) == PLAN
    assert read_plan(attempts[1].plan).stop_step == 10
    assert json.loads(attempts[0].deepspeed.read_text()) == PLAN.deepspeed
    assert attempts[0].logs.is_dir()


def test_damaged_files_are_named() -> None:
    run = create_run(PLAN.config)
    attempt = new_attempt(run, PLAN)
    attempt.plan.write_text('{"config": {"nonsense": 1}}')
    with pytest.raises(TrainctlError, match=r"plan\.json cannot be read: unknown key") as caught:
        read_plan(attempt.plan)
    assert caught.value.exit_code is ExitCode.run_state
    run.record.write_text("{}")
    with pytest.raises(TrainctlError, match=r"run\.json cannot be read: it has no id"):
        run_id(run)


def test_an_attempt_is_there_with_its_plan_or_not_at_all() -> None:
    run = create_run(PLAN.config)
    new_attempt(run, replace(PLAN, stop_step=7))
    with pytest.raises(ValueError, match="not JSON compliant"):
        new_attempt(run, replace(PLAN, total_steps=float("inf")))
    # A resume goes on from the last attempt that was made, not from how the run began.
    assert last_attempt(run) == 1 and read_plan(run.attempt(1).plan).stop_step == 7
    assert new_attempt(run, PLAN).number == 2
    assert [path.name for path in sorted(run.attempts.iterdir())] == ["1", "2"]


def test_a_path_that_cannot_be_looked_at_is_no_run() -> None:
    long = Path("x" * 300)
    assert not is_run(long)
    code, message, _ = code_of(long)
    assert code is ExitCode.run_state and "File name too long" in message


def test_a_removed_run_leaves_nothing_and_no_file_is_removed_while_it_is_open() -> None:
    """NFS keeps such a file under another name, and the folder with it."""
    run = create_run(PLAN.config)
    new_attempt(run, PLAN)
    (run.root / "link").symlink_to(Path.cwd())
    open_then: list[Path] = []
    watching = True

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event == "os.remove":
            name = Path(str(arguments[0])).name
            opened = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            open_then.extend(path for path in opened if path.readlink() == run.root / name)

    sys.addaudithook(look)  # for good, so it is told when to be quiet
    try:
        remove_run(run)
    finally:
        watching = False
    assert not run.root.exists() and Path.cwd().is_dir()
    assert open_then == []
