"""Resuming with another schedule: what is refused, what is said, and what is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import small_checkpoints

from trainctl.cli.main import run
from trainctl.errors import ExitCode
from trainctl.launchers.interface import LaunchRequest, Outcome
from trainctl.plans.schedule import Curve
from trainctl.runs import checkpoints
from trainctl.runs.directory import open_run, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State

WSD = [
    "recipe=tiny",
    "schedule=wsd",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=20",
    "training.steps=100",
    "optimizer.lr=1e-3",
]


@pytest.fixture(autouse=True)
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the attempts that were started in a new folder; none really runs."""
    monkeypatch.chdir(tmp_path)
    numbers: list[int] = []

    def record(launch: LaunchRequest) -> Outcome:
        numbers.append(launch.attempt.number)
        return Outcome(exit_code=0, state=State.finished)

    monkeypatch.setattr("trainctl.launchers.attempts.run_on_this_machine", record)
    return numbers


def launched(*overrides: str) -> RunPaths:
    assert run(["launch", *WSD, *overrides, "--run-dir", "runs/a"]) == 0
    return open_run(Path("runs/a"))


def save(paths: RunPaths, step: int, **facts: Any) -> None:
    small_checkpoints.save(paths, step, **facts)


def test_a_stable_phase_is_made_longer_and_keeps_the_peak(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched()
    save(paths, 80)
    assert run(["resume", "runs/a", "training.steps=300", "--verbose"]) == 0
    said = capsys.readouterr()
    assert "training.steps: 100 -> 300" in said.err
    assert "stable_steps = 280" in said.out and "decay_steps = 20" in said.out
    plan = read_plan(paths.attempt(2).plan)
    factor = Curve.of(plan).factor
    assert factor(80) == factor(279) == 1 > factor(280)
    assert "learning rate of step" not in said.err
    assert started == [1, 2]


def test_extending_within_the_stable_phase_reports_no_change_of_the_rate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(launched(), 50)
    assert run(["resume", "runs/a", "training.steps=300"]) == 0
    assert "learning rate of step" not in capsys.readouterr().err


@pytest.mark.parametrize("step", [81, 90, 100])
def test_within_the_decay_it_is_refused_with_the_step_to_go_back_to(
    started: list[int], capsys: pytest.CaptureFixture[str], step: int
) -> None:
    paths = launched()
    save(paths, 80, kept_for="stable_phase")
    save(paths, step)
    assert run(["resume", "runs/a", "training.steps=300"]) == ExitCode.run_state
    error = capsys.readouterr().err
    assert f"step-{step:08d} is {step - 80} steps into the decay" in error
    assert "from step 80 or before" in error
    assert f"trainctl resume {paths.root} --step 80 with the same overrides" in error
    assert started == [1]
    # A dry run goes through, and leaves everything where it is.
    again = ["resume", "runs/a", "training.steps=300", "--step", "80"]
    assert run([*again, "--dry-run"]) == 0
    assert [info.step for info in checkpoints.list_checkpoints(paths)] == [80, step]
    assert run(again) == 0
    assert "left behind" in capsys.readouterr().err
    assert [info.step for info in checkpoints.list_checkpoints(paths)] == [80]
    aside = paths.checkpoints / f"step-{step:08d}.before-attempt-2"
    assert (aside / MANIFEST).is_file()
    assert started == [1, 2]


def test_without_an_early_checkpoint_it_says_what_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    save(launched(), 95)
    assert run(["resume", "runs/a", "training.steps=300"]) == ExitCode.run_state
    error = capsys.readouterr().err
    assert "there is no checkpoint so early any more" in error and "training.steps=100" in error


def test_an_extended_schedule_continues_its_decay(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    save(launched(), 90)
    assert run(["resume", "runs/a"]) == 0
    assert "learning rate of step" not in capsys.readouterr().err
    assert started == [1, 2]


def test_the_plan_of_the_attempt_that_saved_it_counts(started: list[int]) -> None:
    """Attempt 2 would have been longer and never saved: 90 is in the decay of attempt 1."""
    paths = launched()
    save(paths, 50)
    assert run(["resume", "runs/a", "training.steps=300"]) == 0
    save(paths, 90, attempt=1)
    assert run(["resume", "runs/a", "training.steps=300"]) == ExitCode.run_state
    save(paths, 90, attempt=2)
    assert run(["resume", "runs/a", "training.steps=300"]) == 0
    assert started == [1, 2, 3]


def test_another_schedule_is_reported_with_both_rates(capsys: pytest.CaptureFixture[str]) -> None:
    linear = ["recipe=tiny", "training.steps=101", "schedule=linear", "schedule.warmup_steps=0"]
    assert run(["launch", *linear, "optimizer.lr=1e-3", "--run-dir", "runs/b"]) == 0
    save(open_run(Path("runs/b")), 50)
    assert run(["resume", "runs/b", "training.steps=201"]) == 0
    error = capsys.readouterr().err
    assert "warning: the learning rate of step 51 is 0.00075; as it was planned before, " in error
    assert "it was 0.0005" in error


def test_a_step_without_a_checkpoint_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    save(launched(), 50)
    assert run(["resume", "runs/a", "--step", "40"]) == ExitCode.run_state
    error = capsys.readouterr().err
    assert "no checkpoint of step 40" in error and "steps with a checkpoint: 50" in error


def test_resume_says_that_the_loss_had_not_improved(
    started: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = launched("training.evaluate_every_steps=10", "training.stop_patience=3")
    save(paths, 60, patience={"best": 2.5, "best_step": 30, "evaluations_since": 3})
    assert run(["resume", "runs/a"]) == 0
    error = capsys.readouterr().err
    assert "ended at step 60, because in 3 evaluations the held-out loss was never below" in error
    assert "2.5000, that of step 30 (training.stop_patience=3)" in error
    assert started == [1]
    assert run(["resume", "runs/a", "training.stop_patience=5"]) == 0
    assert started == [1, 2]


def test_tokens_that_a_plan_miscounts_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """Half the batch until step 50, then 16: a schedule in tokens has to know."""
    half = ["schedule.unit=tokens", "training.global_batch_size=8", "schedule.decay_steps=10"]
    ramp = "training.batch_ramp=[{until_steps: 50, global_batch_size: 8}]"
    save(launched(*half), 50)
    resume = ["resume", "runs/a", "training.global_batch_size=16", "--dry-run"]
    assert run(resume) == 0
    assert "the 50 steps so far had other batches" in capsys.readouterr().err
    assert run([*resume, ramp]) == 0
    assert "had other batches" not in capsys.readouterr().err


def test_samples_that_are_cut_otherwise_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    paths = launched()
    save(paths, 80, samples=640)
    with EventWriter(paths.events, 1) as events:
        events.write("start", step=0, train_tokens=1_000_001)
    assert run(["resume", "runs/a", "training.sequence_length=64"]) == 0
    error = capsys.readouterr().err
    assert "warning: training.sequence_length=64 cuts the text into 15,625 samples" in error
    assert "is number 641 of pass 1" in error
