"""Tests of the commands of docs/records.md on a run that was resumed and rewound."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trainctl.runs.records import EventWriter, number, read_events, step_curve

PAGE = Path(__file__).parents[2] / "docs" / "records.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def require(is_there: object, name: str) -> None:
    """Skip the test where a tool is missing, but fail where all tests must run."""
    if not is_there:
        assert not os.environ.get("TRAINCTL_TESTS_MUST_RUN"), f"{name} is missing"
        pytest.skip(f"{name} is missing")


@pytest.fixture
def curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, Any]]:
    """Return the steps that count of a run in `runs/first`, whose last rows are torn."""
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    for attempt, steps in ((1, range(1, 13)), (2, [*range(9, 15), *range(12, 16)])):
        with EventWriter(run / "events.jsonl", attempt) as writer:
            for step in steps:
                late = {"intervention": "skip"} if step == 14 else {}
                seconds = {"forward": step / 100, "a.b": 1.0}
                loss = float("nan") if step == 10 else 1 / step + attempt
                writer.write("step", step=step, loss=loss, mfu=None, seconds=seconds, **late)
                if step % 5 == 0:
                    writer.write("evaluation", step=step, loss=2 / step)
    for file in (run / "steps").iterdir():
        whole = file.read_bytes()
        file.write_bytes(whole + whole.splitlines()[-1][:-20])
    monkeypatch.chdir(tmp_path)
    found = step_curve(read_events(run / "events.jsonl"))
    assert list(found) == list(range(1, 16)) and len(list((run / "steps").iterdir())) == 3
    return found


def run_block(tool: str) -> dict[str, Any]:
    """Run the block of Python that imports the tool, and return its names."""
    require(importlib.util.find_spec(tool), tool)
    (code,) = (text for kind, text in BLOCKS if kind == "python" and f"import {tool}" in text)
    names: dict[str, Any] = {}
    exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_pandas_reads_the_curve(
    curve: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = run_block("pandas")
    found = names["curve"]
    assert list(found.index) == list(curve)
    for step, event in curve.items():
        row = found.loc[step]
        assert row["loss"] == pytest.approx(number(event["loss"]), rel=1e-15, nan_ok=True)
        assert row["seconds.forward"] == event["seconds"]["forward"]
        assert row["attempt"] == event["attempt"]
    assert found.loc[14, "intervention"] == "skip"
    assert str(curve[15]["loss"]) in capsys.readouterr().out


def test_duckdb_reads_the_curve(curve: dict[int, dict[str, Any]]) -> None:
    found = run_block("duckdb")["curve"].fetchall()
    assert [row[0] for row in found] == list(curve)
    for step, loss, forward in found:
        assert loss == pytest.approx(number(curve[step]["loss"]), rel=0, abs=0, nan_ok=True)
        assert forward == curve[step]["seconds"]["forward"]


@pytest.mark.slow  # jq is not among Python's company
def test_jq_reads_events(curve: dict[int, dict[str, Any]]) -> None:
    require(shutil.which("jq"), "jq")
    (text,) = (text for kind, text in BLOCKS if kind == "console" and "jq" in text)
    (command,) = re.findall(r"^\$ (.*)$", text, re.MULTILINE)
    with Path("runs", "first", "events.jsonl").open("a") as stream:
        stream.write('{"schema": 1, "event": "evaluation", "st')
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["5\t0.4", "10\t0.2", "10\t0.2", "15\t0.13333333333333333"]
