"""`launch` and `resume`: what is refused, what is shown, and one run from start to end."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode
from trainctl.launchers.interface import LaunchRequest, Outcome
from trainctl.launchers.planning import compose_config
from trainctl.runs.directory import create_run, last_attempt, open_run, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State

pytestmark = pytest.mark.usefixtures("preloaded")

SMALL = [
    "recipe=tiny",
    "training.sequence_length=64",
    "training.steps=6",
    "schedule.warmup_steps=2",
    "training.global_batch_size=4",
    "training.micro_batch_size=1",
    "training.evaluation_samples=2",
    "training.sample_tokens=8",
    "data.max_bytes=200000",
    "logging.every_steps=1",
]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the attempts that were started, none of which really runs."""
    numbers: list[int] = []

    def record(launch: LaunchRequest) -> Outcome:
        numbers.append(launch.attempt.number)
        return Outcome(exit_code=0, state=State.finished)

    monkeypatch.setattr("trainctl.launchers.attempts.run_on_this_machine", record)
    return numbers


def trainctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainctl", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def test_a_dry_run_shows_everything_and_makes_nothing(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", "recipe=7b-zero3", "kernels=liger", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for part in (
        "Plan of 7b-zero3",
        "accumulation 64 x data 8",
        "of 79.65: fits",
        "trainctl.launchers.agent",
    ):
        assert part in text
    assert list(tmp_path.iterdir()) == []
    assert started == []


def test_a_dry_run_as_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", *SMALL, "--dry-run", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["total_steps"] == 6
    assert document["budget"]["fits"] is True
    assert document["command"]["ranks_per_node"] == 2


LACKING = {
    ("slurm",): "sbatch is not installed",
    ("kubernetes", "launcher.kubernetes_image=i", "launcher.kubernetes_claims={c: /}"):
        "kubectl is not installed",
    ("ray",): "no job server of Ray answers",
}  # fmt: skip
"""What a machine without any program lacks to hand a run over."""


@pytest.mark.parametrize("launcher", LACKING, ids=lambda launcher: launcher[0])
def test_a_dry_run_needs_no_program_of_a_launcher(
    launcher: tuple[str, ...], started: list[int], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A job is often prepared on another machine than the one that hands it over."""
    monkeypatch.setenv("PATH", "/nonexistent")
    kind, *others = launcher
    arguments = ["launch", "recipe=tiny", "hardware.nodes=1", f"launcher={kind}", *others]
    assert run([*arguments, "--dry-run"]) == 0
    output = capsys.readouterr()
    assert "Commands" in output.out
    assert f": {LACKING[launcher]}" in output.err.split("warning[")[1]
    assert run(arguments) == ExitCode.environment
    assert LACKING[launcher] in capsys.readouterr().err
    assert started == []


def test_what_does_not_fit_is_refused_with_what_would(
    tmp_path: Path, started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["launch", "recipe=7b-zero3", "hardware=1xrtx-4090-24g"]
    assert run(arguments) == ExitCode.does_not_fit
    error = capsys.readouterr().err
    assert "what would fit:" in error
    assert "offload" in error
    # Forced, it goes on to the next obstacle: this machine has no such device.
    assert run([*arguments, "--force"]) == ExitCode.environment
    assert "this machine has no cuda device" in capsys.readouterr().err
    assert started == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_trained_yet_is_refused(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *SMALL, "model.trust_remote_code=true"]) == ExitCode.bad_input
    error = capsys.readouterr().err
    assert "model.trust_remote_code=true: training with" in error and "not there yet" in error
    assert started == []


def test_launching_into_a_run_is_refused(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *SMALL, "--run-dir", "runs/a"]) == 0
    assert run(["launch", *SMALL, "--run-dir", "runs/a"]) == ExitCode.run_state
    assert "already holds a run" in capsys.readouterr().err
    assert started == [1]


def test_a_run_without_a_checkpoint_is_started_again_as_it_was(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume"]) == ExitCode.run_state
    assert "there is no run in runs" in capsys.readouterr().err
    own = ["optimizer.lr=1e-4", "training.stop_after_steps=4"]
    assert run(["launch", *SMALL, *own, "--run-dir", "runs/a"]) == 0
    assert run(["resume"]) == 0
    error = capsys.readouterr().err
    assert "configuration: unchanged since the last attempt" in error
    assert "from the beginning: there is no checkpoint yet" in error
    assert started == [1, 2]
    kept = read_plan(open_run(Path("runs/a")).attempt(2).plan).config
    assert (kept.recipe, kept.optimizer.lr, kept.training.stop_after_steps) == ("tiny", 1e-4, 4)


def test_checkpoints_that_are_gone_are_not_begun_anew_in_silence(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *SMALL, "--run-dir", "runs/a"]) == 0
    paths = open_run(Path("runs/a"))
    with EventWriter(paths.events, 1) as events:
        events.write("checkpoint", step=4, path="checkpoints/step-00000004")
    assert run(["resume"]) == ExitCode.run_state
    assert "saved a checkpoint at step 4, and none is there any more" in capsys.readouterr().err
    (paths.checkpoints / "step-00000004").mkdir()
    (paths.checkpoints / "latest").write_text("step-00000004\n")
    assert run(["resume"]) == ExitCode.run_state
    assert "step-00000004: manifest is not readable" in capsys.readouterr().err
    assert run(["resume", "--from-start", "--step", "4"]) == ExitCode.bad_input
    assert run(["resume", "--from-start"]) == 0
    assert "step-00000004.before-attempt-2" in capsys.readouterr().err
    assert [path.name for path in paths.checkpoints.iterdir()] == ["step-00000004.before-attempt-2"]
    assert started == [1, 2]


def failed_at_start(paths: RunPaths, attempt: int) -> None:
    """Records of an attempt whose first rank ended before its first step."""
    with EventWriter(paths.events, attempt) as events:
        events.write("launch", host="h", pid=1, ranks=2)
        where = {"rank": 0, "node": 0, "host": "h", "pid": 7, "log": "", "log_tail": []}
        message = "ended with exit code 1: ValueError: no such kernel"
        events.write("failure", cause="code", message=message, hint="", **where)


def test_what_failed_at_its_start_does_not_stick(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["launch", *SMALL, "--run-dir", "runs/a"]) == 0
    paths = open_run(Path("runs/a"))
    with EventWriter(paths.events, 1) as events:
        events.write("launch", host="h", pid=1, ranks=2)
        events.write("step", step=1, loss=1.0)
        events.write("failure", cause="killed", rank=1, node=0, message="was killed")
    assert run(["resume", "model.attention=eager"]) == 0
    failed_at_start(paths, 2)
    capsys.readouterr()
    assert run(["resume", "optimizer.lr=1e-4"]) == 0
    error = capsys.readouterr().err
    assert "attempt 2 failed before its first step, and what it changed is left out" in error
    assert "model.attention: sdpa -> eager" in error and "no such kernel" in error
    assert "changed since attempt 1: optimizer.lr: 0.003 -> 0.0001" in error
    config = read_plan(paths.attempt(3).plan).config
    assert config.model.attention.value == "sdpa" and config.optimizer.lr == 1e-4
    # The failed one's is there for who asks for it; every command has the same notion.
    assert run(["resume", "--attempt", "2"]) == 0
    config = read_plan(paths.attempt(4).plan).config
    assert config.model.attention.value == "eager" and config.optimizer.lr == 0.003
    failed_at_start(paths, 4)
    shown = {}
    for options in ((), ("--attempt", "2")):
        capsys.readouterr()
        assert run(["config", "show", "runs/a", "--json", *options]) == 0
        shown[options] = json.loads(capsys.readouterr().out)
    assert shown[()]["optimizer"]["lr"] == 1e-4
    assert shown["--attempt", "2"]["model"]["attention"] == "eager"
    assert run(["resume", "--attempt", "9"]) == ExitCode.run_state
    assert "has no attempt 9" in capsys.readouterr().err


def test_resume_auto_starts_then_starts_again_until_there_is_a_checkpoint(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["launch", *SMALL, "--resume", "auto", "--run-dir", "runs/a"]
    assert run(command) == 0
    assert run([*command, "optimizer.lr=1e-4"]) == 0
    assert started == [1, 2]
    error = capsys.readouterr().err
    assert "changed since the last attempt: optimizer.lr: 0.003 -> 0.0001" in error
    assert "there is no checkpoint yet" in error
    assert read_plan(open_run(Path("runs/a")).attempt(2).plan).config.optimizer.lr == 1e-4


def test_resume_auto_needs_a_directory(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["launch", *SMALL, "--resume", "auto"]) == ExitCode.bad_input
    assert "--run-dir" in capsys.readouterr().err


def test_a_run_in_use_is_not_resumed(tmp_path: Path) -> None:
    directory = tmp_path / "runs" / "a"
    create_run(compose_config(SMALL, None).config, run_dir=directory)
    holding = (
        "import sys, pathlib; from trainctl.runs.lock import hold_lock; "
        "from trainctl.runs.layout import RunPaths\n"
        "with hold_lock(RunPaths(pathlib.Path(sys.argv[1]))): print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        done = trainctl("resume", "runs/a")
        other.communicate("\n")
    assert done.returncode == ExitCode.run_state
    assert f"process {other.pid}" in done.stderr


def test_a_failure_shows_the_log_and_passes_the_exit_code_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(
        exit_code=137,
        state=State.failed,
        message="rank 1 was ended by SIGKILL",
        hint="look for the out-of-memory killer",
        log=Path("rank-1.log"),
        log_tail=("last words",),
    )
    monkeypatch.setattr("trainctl.launchers.attempts.run_on_this_machine", lambda *_, **__: outcome)
    assert run(["launch", *SMALL]) == 137
    *said, last = capsys.readouterr().err.splitlines()
    assert said[-5:] == [
        "the end of rank-1.log:",
        "  last words",
        "error: rank 1 was ended by SIGKILL",
        "hint: look for the out-of-memory killer",
        "more: trainctl explain 137",
    ]
    assert re.fullmatch(r"trainctl resume \S+ starts from the beginning: no step is lost", last)


FAILING = """
import sys
from trainctl.cli.main import entry_point
from trainctl.launchers import attempts
from trainctl.launchers.interface import Outcome
from trainctl.runs.status import State
outcome = Outcome(exit_code=6, state=State.failed, message="rank 1 died")
attempts.run_on_this_machine = lambda launch: outcome
sys.argv = ["trainctl", "launch", "recipe=tiny", "--run-dir", "r"]
entry_point()
"""


def test_readers_that_have_gone_change_neither_the_launch_nor_its_exit_code(
    tmp_path: Path,
) -> None:
    """`trainctl launch ... 2>&1 | head` must not end with 0 when a rank died."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", FAILING], stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 6
    assert last_attempt(open_run(tmp_path / "r")) == 1


def test_a_run_from_start_to_end(tmp_path: Path) -> None:
    """This run has one process; `tests/e2e/test_runs.py` covers two, and the files they leave."""
    one = (*SMALL, "hardware.devices_per_node=1")
    launched = trainctl(
        "launch", *one, "training.stop_after_steps=4", "--run-dir", "runs/a", "--json"
    )
    assert launched.returncode == 0, launched.stderr
    events = [json.loads(line) for line in launched.stdout.splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == [1, 2, 3, 4]

    resumed = trainctl("resume")
    assert resumed.returncode == 0, resumed.stderr
    lines = resumed.stdout.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["5/6", "6/6"]
    assert any(line.startswith("evaluation at step 6: held-out loss ") for line in lines)
    assert any("unigram entropy" in line for line in lines)
    assert lines[lines.index("sampled text:") + 1].startswith("  def ")
    assert lines[-1] == f"run directory: {tmp_path / 'runs' / 'a'}"
    assert "training.stop_after_steps: 4 -> None" in resumed.stderr
    assert "from step-00000004" in resumed.stderr
    assert last_attempt(RunPaths(tmp_path / "runs" / "a")) == 2

    again = trainctl("resume", "runs/a")
    assert again.returncode == 0
    assert again.stdout == ""
    assert "nothing to do" in again.stderr
