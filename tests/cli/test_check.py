"""`validate` and `estimate-memory`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode

LARGE = ["recipe=7b-zero3", "hardware=8xa100-80g"]
TOO_LARGE = ["recipe=7b-zero3", "hardware=1xrtx-4090-24g"]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_valid_config_says_so_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "recipe=tiny"]) == 0
    assert capsys.readouterr() == ("tiny is valid on 2xcpu\n", "")


def test_all_problems_come_at_once_each_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "recipe=tiny", "optimizer.lrr=3", "modle=x"]) == ExitCode.bad_input
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("no key optimizer.lrr") == 1
    assert "set by: optimizer.lrr=3" in captured.err
    assert "did you mean optimizer.lr" in captured.err
    assert captured.err.count("no key modle") == 1
    assert captured.err.endswith("error: 2 problems in this configuration\n")


def test_a_problem_of_the_plan_names_what_set_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", "recipe=tiny", "training.global_batch_size=31"]) == ExitCode.bad_input
    error = capsys.readouterr().err
    assert error.count("train_batch_size=31 is not a multiple of") == 1
    assert "\n  set by: training.global_batch_size=31\n" in error


def test_what_cannot_be_trained_yet_is_valid_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["validate", *LARGE, "model.trust_remote_code=true"]) == 0
    assert "training with a model's own code is not there yet" in capsys.readouterr().err


def test_what_does_not_fit_is_not_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["validate", *TOO_LARGE]) == ExitCode.does_not_fit
    assert "does not fit: a device needs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["recipe=tiny"], 0), (TOO_LARGE, ExitCode.does_not_fit), (["optimizer.lr=-1"], 2)],
)
def test_the_json_report_agrees_with_the_exit_code(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["validate", "--json", *arguments]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["valid"] is (code == 0)
    codes = [each["exit_code"] for each in report["findings"] if each["severity"] == "error"]
    assert (codes or [0])[0] == code


def test_the_budget_is_printed_and_its_json_has_the_same_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["estimate-memory", *LARGE, "--json"]) == 0
    budget = json.loads(capsys.readouterr().out)
    assert budget["schema"] == 1
    assert sum(budget["components"].values()) == budget["device_peak_bytes"]
    assert run(["estimate-memory", *LARGE]) == 0
    table = capsys.readouterr().out
    assert f"{budget['device_peak_bytes'] / 2**30:.2f} of 80.00: fits" in table


def test_suggested_changes_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["estimate-memory", *TOO_LARGE]) == ExitCode.does_not_fit
    captured = capsys.readouterr()
    assert "does not fit" in captured.out
    suggestion = captured.err.split("what would fit:\n")[1].splitlines()[0]
    overrides = suggestion.partition("  (peak")[0].split()
    assert run(["estimate-memory", *TOO_LARGE, *overrides]) == 0


@pytest.mark.parametrize("command", [["estimate-memory"], ["launch", "--dry-run"]])
def test_a_loss_that_may_not_fit_is_told_in_chunks(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without liger-kernel the plain loss is chosen before the memory is known."""
    assert run([*command, "recipe=70b-zero3-nodes", "kernels.liger=false"]) == 0
    printed = capsys.readouterr().err
    assert "TC150" in printed
    first, *_ = printed.split("what would certainly fit:\n")[1].splitlines()
    assert first.split("  (peak")[0].strip() == "kernels.cross_entropy=chunked"


def test_a_config_that_cannot_be_planned_has_no_budget(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recipe=tiny", "training.global_batch_size=31"]
    assert run(["estimate-memory", *arguments]) == ExitCode.bad_input
    assert capsys.readouterr().out == ""


def test_what_a_template_is_given_anyway_is_shown_where_it_was_set(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "data.template_arguments={tools: []}"
    chat = ["data=chat", "data.paths=[a.jsonl]", "data.packing=best_fit"]
    assert run(["validate", "recipe=tiny", *chat, given]) == ExitCode.bad_input
    said = capsys.readouterr()
    assert f"set by: {given}" in said.out + said.err
