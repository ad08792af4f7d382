"""Sampled answers that a run keeps as text: written, read, and shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from made_runs import new_run

from trainctl.cli.main import run as cli
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.layout import RunPaths
from trainctl.runs.rollouts import (
    newest_rollouts,
    read_rollouts,
    rollout_steps,
    write_rollouts,
)


def answer(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "number": number,
        "sample": 0,
        "prompt": f"{number}+{number}=",
        "answer": str(2 * number),
        "tokens": 2,
        "is_finished": True,
        "rewards": {"exact": 1.0, "polite": None},
        "reward": 1.0,
        "advantage": 0.5,
        **changes,
    }


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def test_answers_are_read_as_they_were_written_without_secrets(run: RunPaths) -> None:
    write_rollouts(run, 7, [answer(1), answer(2, answer="api_key=hunter2", advantage=math.nan)])
    write_rollouts(run, 7, [answer(3), answer(4, answer="api_key=hunter2", advantage=math.nan)])
    first, second = read_rollouts(run, 7)
    assert first == {**answer(3), "step": 7}
    assert "hunter2" not in second["answer"]
    assert second["advantage"] is None
    assert rollout_steps(run) == [7]
    assert [path.name for path in run.rollouts.iterdir()] == ["step-00000007.jsonl.gz"]


def test_the_newest_steps_come_first_and_damaged_files_are_left_out(run: RunPaths) -> None:
    assert list(newest_rollouts(run, 5)) == []
    for step in (1, 2, 3, 100_000_000):
        write_rollouts(run, step, [answer(step), answer(step, sample=1)])
    damaged = run.rollouts / "step-00000003.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (run.rollouts / "step-00000004-0123456789abcdef").mkdir()
    found = [(each["step"], each["sample"]) for each in newest_rollouts(run, 3)]
    assert found == [(100_000_000, 0), (100_000_000, 1), (2, 0)]
    with pytest.raises(TrainctlError, match="cannot be read"):
        read_rollouts(run, 3)
    with pytest.raises(TrainctlError, match="no answers of step 9: kept are those of steps 1 to"):
        read_rollouts(run, 9)


def test_data_show_and_the_report_show_the_answers_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = new_run(tmp_path / "run")
    told = answer(5, answer="10\x1b[2J\n</script>", reward=None, is_finished=False)
    write_rollouts(made, 2, [told])
    command = ["data", "show", str(made.root), "--step"]
    assert cli([*command, "2"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "prompt 5, answer 0: reward none (exact 1, polite none), advantage 0.5, 2 tokens, cut",
        "  5+5=",
        "  10\ufffd[2J",
        "  </script>",
    ]
    assert cli([*command, "2", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["rollouts"][0]["rewards"] == {"exact": 1.0, "polite": None}
    assert cli([*command, "3"]) == ExitCode.run_state
    assert "kept are those of steps 2 to 2" in capsys.readouterr().err
    assert cli(["report", str(made.root), "--output", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "Newest sampled answers" in page
    assert "10\\u001b[2J" in page
    assert "2J\\n</script>" not in page
