"""`trainctl evaluate --tasks`: what is refused before anything is read, and what becomes rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trainctl.cli import evaluate
from trainctl.cli.main import run as command
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers import offline
from trainctl.runs.layout import RunPaths
from trainctl.train.tasks import require_known, rows_of


def test_options_of_tasks_need_tasks(capfd: pytest.CaptureFixture[str]) -> None:
    assert command(["evaluate", "nowhere", "--shots", "0"]) == ExitCode.bad_input
    assert "--shots is of tasks" in capfd.readouterr().err


def test_without_the_harness_its_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    hidden = lambda name: None if name == "lm_eval" else find(name)  # noqa: E731
    monkeypatch.setattr(offline, "find_spec", hidden)
    assert command(["evaluate", "nowhere", "--tasks", "arc_easy"]) == ExitCode.environment
    said = capfd.readouterr().err
    assert "a package that is missing (lm_eval)" in said and "'trainctl[eval]'" in said


def test_a_task_that_there_is_none_of_is_refused_with_the_nearest() -> None:
    with pytest.raises(TrainctlError, match="no task 'arc_esy'") as caught:
        require_known(["arc_easy", "arc_esy"], ["arc_easy", "hellaswag"])
    assert "arc_easy" in caught.value.hint
    assert evaluate.task_names("a, b,a,") == ("a", "b")
    with pytest.raises(TrainctlError, match="names no task"):
        evaluate.task_names(" , ")


def test_what_is_kept_has_a_place_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept" / "other").mkdir(parents=True)
    choice = offline.WeightsChoice(run=RunPaths(tmp_path / "run"))
    monkeypatch.setattr(offline, "require_harness", lambda: None)
    with pytest.raises(TrainctlError, match="kept exists and is not an empty folder"):
        offline.evaluate_tasks(choice, ["a"], keep=tmp_path / "kept")


def test_a_row_is_a_metric_of_a_task() -> None:
    found = {
        "results": {
            "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.1, "sample_len": 7},
            "both": {"f1,strict": 1, "f1_stderr,strict": "N/A", "name": "both"},
        },
        "n-samples": {"arc": {"original": 9, "effective": 7}},
        "n-shot": {"arc": 3},
    }
    of_arc, of_both = rows_of(found)
    assert list(of_arc.values()) == ["arc", "acc", "none", 0.5, 0.1, 7, 3]
    assert list(of_both.values()) == ["both", "f1", "strict", 1.0, None, None, None]
