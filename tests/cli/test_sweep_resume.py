"""`sweep FOLDER --resume`: what is started, resumed and left alone. Nothing really runs."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.main import run
from trainctl.errors import ExitCode
from trainctl.runs.directory import last_attempt, open_run, read_plan
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, Status, write_status

SWEEP = ("recipe=tiny", "training.steps=6", "optimizer.lr=1e-5,1e-4,1e-3,1e-2,1e-1,1")


@pytest.fixture
def queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Run and attempt of each that was given to the queue."""
    monkeypatch.chdir(tmp_path)
    found: list[tuple[str, int]] = []

    def run_queue(
        attempts: list[tuple[RunPaths, AttemptPaths]],
        *,
        parallel: int,
        on_end: Callable[[RunPaths, int], Any],
    ) -> None:
        found.extend((paths.root.name, attempt.number) for paths, attempt in attempts)

    monkeypatch.setattr("trainctl.launchers.sweep.run_queue", run_queue)
    return found


def ended(paths: RunPaths, state: State, code: int, **failure: Any) -> None:
    """Write the records of a first attempt that ended in this state."""
    with EventWriter(paths.events, 1) as events:
        events.write("launch", host="h", pid=1, ranks=1)
        if failure:
            events.write("failure", rank=0, node=0, message="died", **failure)
    now = time.time()
    status = Status(state=state, attempt=1, host="h", pid=1, started=now, updated=now)
    write_status(paths, status.changed(state, exit_code=code, message="died"))


def test_a_resumed_sweep_starts_new_runs_resumes_interrupted_ones_and_leaves_finished_ones(
    queued: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", *SWEEP, "--sweep-dir", "s"]) == 0
    assert queued == [(str(index), 1) for index in range(6)]
    record = json.loads(Path("s/sweep.json").read_text())
    assert record["runs"][3] == ["recipe=tiny", "training.steps=6", "optimizer.lr=0.01"]
    runs = [open_run(Path("s", str(index))) for index in range(6)]
    ended(runs[0], State.finished, 0)
    ended(runs[1], State.failed, 137, cause="killed")
    ended(runs[2], State.failed, 6, cause="reported")  # a loss that is not finite, say
    shutil.rmtree(runs[3].root)  # `trainctl runs rm`, to have it done again
    ended(runs[4], State.stopped, 130)
    queued.clear()
    capsys.readouterr()
    assert run(["sweep", "s", "--resume", "--dry-run"]) == 0
    shown = capsys.readouterr().out.splitlines()
    what = [line.split()[1] for line in shown]
    assert what == ["leave", "resume", "leave", "make", "resume", "start"]
    assert queued == [] and last_attempt(runs[1]) == 1 and not runs[3].root.exists()
    with hold_lock(runs[4]):
        assert run(["sweep", "s", "--resume", "--dry-run"]) == 0
    assert "4: leave (stopped)" in capsys.readouterr().out, "somebody else has it"
    assert run(["sweep", "s", "--resume"]) == 0
    assert queued == [("1", 2), ("3", 1), ("4", 2), ("5", 1)]
    rates = [read_plan(paths.attempt(1).plan).config.optimizer.lr for paths in runs]
    assert rates == [1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1]
    # Killed again before any of these began: the attempts that were made are started as they are.
    queued.clear()
    assert run(["sweep", "s", "--resume"]) == 0
    assert queued == [("1", 2), ("3", 1), ("4", 2), ("5", 1)]


def test_what_is_no_sweep_or_takes_overrides_is_refused(
    queued: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sweep", "nothing", "--resume"]) == ExitCode.run_state
    assert run(["sweep", "s", "optimizer.lr=1", "--resume"]) == ExitCode.bad_input
    secret = "launcher.environment={NCCL_DEBUG: hush}"  # it might be one: mappings are not recorded
    assert run(["sweep", *SWEEP, secret, "--sweep-dir", "s"]) == 0
    shutil.rmtree("s/2")
    capsys.readouterr()
    assert run(["sweep", "s", "--resume"]) == ExitCode.run_state
    assert "run 2 is not there, and what it was to be is not recorded" in capsys.readouterr().err
    assert "hush" not in Path("s/sweep.json").read_text()
