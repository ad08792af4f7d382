"""A resume under another muP base is refused before an attempt is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode
from trainctl.launch.outcome import Outcome
from trainctl.plan.mup import multipliers
from trainctl.runs import checkpoints
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import last_attempt, open_run
from trainctl.runs.status import State


def test_another_base_is_refused_and_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def record(*_: Any, **__: Any) -> Outcome:
        return Outcome(exit_code=0, state=State.finished)

    monkeypatch.setattr("trainctl.launch.local.run_launch", record)
    mup = ["model.mup=true", "model.mup_base_width=64"]
    assert run(["launch", "recipe=tiny", *mup, "--run-dir", "runs/a"]) == 0
    paths = open_run(Path("runs/a"))
    folder = checkpoints.temporary_path(paths, 80)
    folder.mkdir(parents=True)
    had = multipliers(config_of(paths).model)
    facts = {"format": checkpoints.FORMAT, "step": 80, "files": [], "multipliers": had}
    checkpoints.write_manifest(folder, facts)
    checkpoints.commit(paths, 80)
    capsys.readouterr()
    for other in ("model.mup_base_width=128", "model.mup=false"):
        assert run(["resume", "runs/a", other]) == ExitCode.run_state
        assert "trained with the logits multiplied by 0.5" in capsys.readouterr().err
        assert last_attempt(paths) == 1
    assert run(["resume", "runs/a"]) == 0
    assert last_attempt(paths) == 2
