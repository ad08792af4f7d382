"""`trainctl schedule show`: the curve of what would be trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode

RAMP = "training.batch_ramp=[{until_steps: 40, global_batch_size: 8}]"


def test_the_curve_and_its_turns_are_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    assert run(["schedule", "show", "recipe=tiny", "schedule=wsd", RAMP]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert "Learning rate of tiny" in lines[0] and "\x1b" not in text
    assert max(len(line) for line in lines[:18]) == 90
    assert any("0.003┤" in line for line in lines) and "optimizer step" in text
    (stable,) = [line for line in lines if "end of the stable phase" in line]
    assert "step       128" in stable and "442,368 tokens" in stable and "0.003" in stable
    assert "batch of 16 sequences from step 41" in text


def test_as_json_it_has_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "show", "recipe=tiny", "schedule=wsd", RAMP, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    points = document["points"]
    assert [point["step"] for point in points] == list(range(1, 161))
    assert (document["kind"], document["stable_end"]) == ("wsd", 128)
    assert points[127]["learning_rate"] == 0.003 > points[128]["learning_rate"]
    assert points[40]["tokens"] == 40 * 8 * 256 and points[40]["global_batch_size"] == 16
    assert points[-1]["learning_rate"] == 0


def test_a_long_run_has_its_corners_among_the_points(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["recipe=tiny", "schedule=wsd", "training.steps=1234567", "schedule.warmup_steps=777"]
    assert run(["schedule", "show", *long, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    steps = [point["step"] for point in document["points"]]
    assert len(steps) < 2100 and steps == sorted(set(steps))
    assert {1, 777, 778, document["stable_end"], 1234567} <= set(steps)


@pytest.mark.parametrize("name", ["a.png", "a.svg", "a.html"])
def test_a_chart_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    file = tmp_path / name
    assert run(["schedule", "show", "recipe=tiny", RAMP, "--plot", str(file)]) == 0
    assert file.stat().st_size > 5000
    assert capsys.readouterr().out == ""


def test_a_run_without_steps_has_no_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schedule", "show", "recipe=tiny", "training.steps=0"]) == 0
    assert capsys.readouterr().out == "no step\n"


def test_what_cannot_be_planned_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(
        ["schedule", "show", "recipe=tiny", "schedule=step", "schedule.step_every=null"]
    ) == (ExitCode.bad_input)
    assert "schedule.step_every" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"), [("a.txt", "hint: a.png"), ("charts/a.png", "hint: mkdir -p charts")]
)
def test_where_no_chart_can_be_written(
    name: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["schedule", "show", "recipe=tiny", "--plot", name]) == ExitCode.bad_input
    assert says in capsys.readouterr().err
