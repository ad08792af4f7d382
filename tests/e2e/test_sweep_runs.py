"""A sweep and a detached run, by the real commands on this machine."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from commands import TINY, curve, events, finish, live_processes, start, trainctl
from preloaded_server import PreloadedServer

from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder

pytestmark = pytest.mark.slow

SMALL = (*TINY, "hardware.devices_per_node=1", "training.evaluation_samples=2")


def test_a_sweep_runs_every_combination_and_shows_the_best(
    tmp_path: Path, preloaded_server: PreloadedServer
) -> None:
    """What is killed starts as a user's does; everything after it is preloaded."""
    quick = preloaded_server.environment
    arguments = ("sweep", *SMALL, "optimizer.lr=1e-5,1e-2", "training.steps=5")
    # It is killed before anything is saved, and goes on by its folder alone.
    killed = start(*arguments, "--sweep-dir", "s", cwd=tmp_path)
    first = tmp_path / "s" / "0"
    deadline = time.monotonic() + 120
    while not events(first, "launch") and time.monotonic() < deadline:
        time.sleep(0.1)
    killed.kill()
    killed.communicate()
    while find_holder(RunPaths(first)) is not None and time.monotonic() < deadline:
        time.sleep(0.1)
    talk = trainctl("sweep", "s", "--resume", cwd=tmp_path, **quick)
    assert "0: resume (" in talk and "1: start (not started yet)" in talk
    assert "run 0 of 2: ended" in talk and "run 1 of 2: ended" in talk
    rows = json.loads(trainctl("sweep", "s", "--json", cwd=tmp_path, **quick))["runs"]
    assert [row["values"] for row in rows] == [{"optimizer.lr": "1e-05"}, {"optimizer.lr": "0.01"}]
    assert [row["run"]["state"] for row in rows] == ["finished", "finished"]
    assert rows[1]["held_out_loss"] < rows[0]["held_out_loss"] and rows[1]["best"]
    assert "finished" in trainctl("runs", "ls", "s", cwd=tmp_path, **quick)
    talk = trainctl("sweep", "s", "--resume", cwd=tmp_path, **quick)
    assert "0: leave (finished)" in talk and "1: leave (finished)" in talk
    assert "nothing to do" in talk
    # What is refused is refused before anything starts.
    out = trainctl(
        "sweep", *SMALL, "optimizer.lr=1e-5,-1", "--sweep-dir", "t", cwd=tmp_path, code=2, **quick
    )
    assert "optimizer.lr=-1" in out and not (tmp_path / "t").exists()


def test_a_detached_run_is_followed_and_stopped(
    tmp_path: Path, preloaded_server: PreloadedServer
) -> None:
    """The run's own processes start as a user's do; only the other commands are preloaded."""
    quick = preloaded_server.environment
    run = tmp_path / "r"
    endless = (*SMALL, "training.steps=1000000", "checkpoint.at_end=true")
    out = trainctl("launch", *endless, "--run-dir", "r", "--detach", cwd=tmp_path)
    assert "trainctl runs attach" in out
    taken = find_holder(RunPaths(run))
    assert taken is not None and taken.pid in live_launchers(run)
    view = start("runs", "attach", "r", cwd=tmp_path)
    deadline = time.monotonic() + 120
    while not curve(run) and time.monotonic() < deadline:
        time.sleep(0.2)
    # Two trainers in one directory: the second is refused, the first goes on.
    before = len(curve(run))
    for second in (("resume", "r"), ("launch", *endless, "--run-dir", "r", "--resume", "auto")):
        refused = trainctl(*second, cwd=tmp_path, code=5, **quick)
        assert f"is in use by another launch: process {taken.pid} on " in refused
    while len(curve(run)) < before + 5 and time.monotonic() < deadline:
        time.sleep(0.2)
    steps = list(curve(run))
    assert len(steps) >= before + 5 and steps == list(range(1, len(steps) + 1))
    assert {event["attempt"] for event in events(run, "step")} == {1}
    # Ctrl-C ends the view only.
    view.send_signal(signal.SIGINT)
    assert finish(view)[0] == 130 and find_holder(RunPaths(run)) is not None
    assert "running" in trainctl("runs", "status", "r", cwd=tmp_path, **quick)
    again = start("runs", "attach", "r", cwd=tmp_path, **quick)
    assert "saved and stopped" in trainctl("runs", "stop", "r", cwd=tmp_path, **quick)
    code, shown, talk = finish(again)
    assert code == 0 and "checkpoint at step" in shown and "saved and stopped" in talk
    assert events(run, "end")[-1]["reason"] == "stop_requested"
    assert not live_processes(run)
    # `--now` ends it without a save.
    trainctl("resume", "r", "--detach", cwd=tmp_path)
    trainctl("runs", "stop", "r", "--now", cwd=tmp_path, **quick)
    assert "exit code 143" in trainctl("runs", "status", "r", cwd=tmp_path, **quick)
    assert not live_processes(run)
    trainctl("runs", "rm", "r", cwd=tmp_path, code=5, **quick)
    trainctl("runs", "rm", "r", "--force", cwd=tmp_path, **quick)
    assert not run.exists()


def live_launchers(run: Path) -> set[int]:
    """Processes of `python -m trainctl.launchers` on the run."""
    wanted = [b"trainctl.launchers", os.fsencode(run)]
    found = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if all(word in words for word in wanted):
                found.add(int(process.name))
    return found
