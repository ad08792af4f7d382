"""`launch` and `resume`: what is refused, what is shown, and one run from start to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.cli.planning import compose
from trainctl.errors import ExitCode
from trainctl.launch.order import Launch
from trainctl.launch.outcome import Outcome
from trainctl.runs.directory import create_run, last_attempt, open_run, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import State

SMALL = [
    "recipe=tiny",
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

    def record(launch: Launch) -> Outcome:
        numbers.append(launch.attempt.number)
        return Outcome(exit_code=0, state=State.finished)

    monkeypatch.setattr("trainctl.launch.local.run_launch", record)
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
    assert run(["launch", "recipe=7b-zero3", "hardware=8xh100-80g", "--dry-run"]) == 0
    text = capsys.readouterr().out
    for part in (
        "Plan of 7b-zero3",
        "accumulation 32 x data 8",
        "of 79.65: fits",
        "trainctl.agent",
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


def test_resume_needs_a_run_and_a_checkpoint(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["resume"]) == ExitCode.run_state
    assert "there is no run in runs" in capsys.readouterr().err
    assert run(["launch", *SMALL, "--run-dir", "runs/a"]) == 0
    assert run(["resume"]) == ExitCode.run_state
    assert "no complete checkpoint to resume from" in capsys.readouterr().err
    assert started == [1]


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
    create_run(compose(SMALL, None).config, run_dir=directory)
    holding = (
        "import sys, pathlib; from trainctl.runs.lock import hold; "
        "from trainctl.runs.layout import RunPaths\n"
        "with hold(RunPaths(pathlib.Path(sys.argv[1]))): print('held', flush=True); input()"
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
    monkeypatch.setattr("trainctl.launch.local.run_launch", lambda *_, **__: outcome)
    assert run(["launch", *SMALL]) == 137
    assert capsys.readouterr().err.splitlines()[-4:] == [
        "the end of rank-1.log:",
        "  last words",
        "error: rank 1 was ended by SIGKILL",
        "hint: look for the out-of-memory killer",
    ]


FAILING = """
import sys
from trainctl.cli.main import entry_point
from trainctl.launch import local
from trainctl.launch.outcome import Outcome
from trainctl.runs.status import State
local.run_launch = lambda launch: Outcome(exit_code=6, state=State.failed, message="rank 1 died")
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
    launched = trainctl(
        "launch", *SMALL, "training.stop_after_steps=4", "--run-dir", "runs/a", "--json"
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
    assert any("unigram entropy of the corpus's tokens" in line for line in lines)
    assert lines[lines.index("sampled text:") + 1].startswith("  def ")
    assert lines[-1] == f"run directory: {tmp_path / 'runs' / 'a'}"
    assert "training.stop_after_steps: 4 -> None" in resumed.stderr
    assert "from step-00000004" in resumed.stderr
    assert last_attempt(RunPaths(tmp_path / "runs" / "a")) == 2

    again = trainctl("resume", "runs/a")
    assert again.returncode == 0
    assert again.stdout == ""
    assert "nothing to do" in again.stderr
