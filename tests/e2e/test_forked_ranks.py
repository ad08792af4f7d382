"""Tests that ranks on CPUs are forks of one process per node, which has imported everything."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import psutil
import pytest
from commands import TINY, curve, finish, start

from trainctl.launchers.rank_command import FORK_VARIABLE

pytestmark = pytest.mark.slow


def ranks_of(run: Path) -> dict[int, psutil.Process]:
    """Return the run's rank processes, by the rank in the name of each one's log."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        if "trainctl.train" in (process.info["cmdline"] or ()):
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            if log.parent == run / "attempts" / "1" / "logs":
                found[int(log.stem.removeprefix("rank-"))] = process
    return found


def test_ranks_are_forks_and_train_as_those_that_import(tmp_path: Path) -> None:
    curves = {}
    for forked in ("1", "0"):
        run = tmp_path / forked
        words = ("launch", *TINY, "training.steps=20", "--run-dir", str(run))
        launcher = start(*words, cwd=tmp_path, **{FORK_VARIABLE: forked})
        deadline = time.monotonic() + 120
        while len(curve(run)) < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        ranks = ranks_of(run)
        assert sorted(ranks) == [0, 1]
        (agent,) = {process.ppid() for process in ranks.values()}
        assert "trainctl.launchers.agent" in psutil.Process(agent).cmdline()
        for process in ranks.values():
            assert ("--fork" in process.cmdline()) == (forked == "1")
            assert os.getsid(process.pid) == process.pid
            assert Path(f"/proc/{process.pid}/fd/0").readlink() == Path(os.devnull)
        code, out, err = finish(launcher)
        assert code == 0, out + err
        started = json.loads((run / "attempts" / "1" / "command.json").read_text())
        assert started["is_forked"] == (forked == "1")
        curves[forked] = curve(run)
    assert curves["1"] == curves["0"] and len(curves["0"]) == 20
