"""Each step reaches a logger once, with the values that count, whatever happens to its process."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import cursor, end, following, send, wait_for
from records_of_runs import append, draw, losses, new_run

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter

pytestmark = pytest.mark.usefixtures("own_options")


def table(run: RunPaths, kind: str) -> list[tuple[int, float]]:
    with (run.root / "table" / f"{kind}.csv").open(newline="") as stream:
        return [(int(row["step"]), float(row[f"{kind}/loss"])) for row in csv.DictReader(stream)]


def check(run: RunPaths) -> None:
    """Assert that the logger's tables are the run's curves, with each step once."""
    train, evaluations = losses(run)
    for kind, curve in (("train", train), ("evaluation", evaluations)):
        assert repr(table(run, kind)) == repr(sorted(curve.items()))  # NaN equals itself


def test_what_counts_of_repeated_steps_is_sent_once(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(1, 200))
    assert send(run, "table") == (0, "")
    check(run)
    before = cursor(run, "table")
    assert before["offset"] == run.events.stat().st_size and before["problem"] == ""
    assert send(run, "table") == (0, "") and cursor(run, "table") == before
    with run.events.open("a") as stream:
        stream.write('{"event": "step", "step": 20')  # is being written
    assert send(run, "table") == (0, "") and cursor(run, "table") == before


def test_all_loggers_use_the_same_names_and_a_new_name_is_a_new_column(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    record = {"loss": 2.0, "learning_rate": 0.1, "seconds": {"total": 0.5}, "mfu": None}
    with EventWriter(run.events, 1) as events:
        events.write("step", step=1, **record, samples=[0, 8])
        assert send(run, "table")[0] == 0
        events.write("step", step=2, **record, grad_norm=float("inf"))
        assert send(run, "table")[0] == 0
    text = (run.root / "table" / "train.csv").read_text()
    rows = list(csv.reader(text.splitlines()))
    assert rows[0] == [
        "step", "time", "train/loss", "train/learning_rate", "seconds/total", "train/grad_norm",
    ]  # fmt: skip
    assert [[row[0], *row[2:]] for row in rows[1:]] == [
        ["1", "2.0", "0.1", "0.5", ""],
        ["2", "2.0", "0.1", "0.5", "inf"],
    ]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_kills_lose_nothing_and_repeat_nothing(tmp_path: Path, seed: int) -> None:
    run, chance = new_run(tmp_path), random.Random(seed)
    records = list(draw(seed, 1_000))
    while records:
        with following(run, "table") as process:
            sent = cursor(run, "table")["points"]
            part, records = records[:200], records[200:]
            for record in part:
                append(run, iter([record]))
            if chance.random() < 0.7:
                wait_for(lambda sent=sent: cursor(run, "table")["points"] > sent)
            time.sleep(chance.random() * 0.3)
            os.kill(process.pid, signal.SIGKILL)
    assert send(run, "table") == (0, "")
    check(run)


def test_a_kill_between_a_logger_s_commit_and_the_cursor_repeats_nothing(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    records = list(draw(3, 300))
    append(run, iter(records[:150]))
    assert send(run, "table") == (0, "")
    before = run.companion("table").cursor.read_text()
    append(run, iter(records[150:]))
    assert send(run, "table") == (0, "")
    run.companion("table").cursor.write_text(before)
    with (run.root / "table" / "train.csv").open("a") as stream:
        stream.write("301,17")  # and in the middle of a row
    assert send(run, "table") == (0, "")
    check(run)


def test_without_a_cursor_it_begins_anew(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(4, 50))
    assert send(run, "table") == (0, "")
    (run.root / "table" / "train.csv").write_text("not,what\nis,expected\n")
    run.companion("table").cursor.unlink()
    assert send(run, "table") == (0, "")
    check(run)
    run.companion("table").cursor.write_text("{")
    code, said = send(run, "table")
    assert code == 4 and "table.json cannot be read" in said


@pytest.mark.parametrize("name", ["events.jsonl", "steps/attempt-1.csv"])
def test_other_records_than_those_that_were_sent_are_not_taken_for_them(
    tmp_path: Path, name: str
) -> None:
    run = new_run(tmp_path)
    append(run, draw(7, 20))
    assert send(run, "table") == (0, "")
    file = run.root / name
    file.write_bytes(file.read_bytes()[:-100])
    assert send(run, "table")[0] == 4
    assert "was cut or replaced" in cursor(run, "table")["problem"]
    assert send(run, "table", "--again") == (0, "")
    check(run)


@pytest.mark.parametrize("name", ["table", "alerts"])
@pytest.mark.parametrize("file", ["events.jsonl", "steps/attempt-1.csv"])
def test_records_that_were_cut_and_have_grown_again_are_not_gone_on_with(
    tmp_path: Path, name: str, file: str
) -> None:
    run = new_run(tmp_path)
    append(run, draw(7, 40))
    path = run.root / file
    whole = path.read_bytes()
    assert send(run, name) == (0, "")
    path.write_bytes(whole[: len(whole) // 2])
    while path.stat().st_size <= len(whole):
        append(run, draw(8, 40))
    assert send(run, name)[0] == 4
    assert "was cut or replaced" in cursor(run, name)["problem"]
    assert send(run, name, "--again") == (0, "")


def test_what_a_killed_follower_left_is_removed_by_the_next(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(7, 20))
    assert send(run, "table") == (0, "")
    left = run.companion("table").folder / ".table.json.0123456789abcdef.tmp"
    of_another = left.with_name(".tensorboard.json.0123456789abcdef.tmp")
    for path in (left, of_another):
        path.touch()
    assert send(run, "table") == (0, "")
    assert not left.exists() and of_another.exists()


FAULTY = '''
"""A logger that does what a file of its folder says."""
import os, time
from trainctl.options.logger import Logger
SPEC = Logger(name="faulty", build="faulty.logger.faulty:Faulty")

class Faulty:
    def __init__(self, run, state):
        self.folder, self.lines = run.folder, list((state or {}).get("lines", []))

    def write(self, points):
        orders = {path.name for path in self.folder.iterdir()}
        if "hang" in orders:
            (self.folder / "hangs").touch()
            time.sleep(3600)
        if "exit" in orders:
            os._exit(3)
        if "raise" in orders:
            raise ConnectionError("the server\\nrefuses")
        self.lines += [[point.number, point.step] for point in points]

    def go_back(self, step):
        self.lines = [line for line in self.lines if line[1] < step]

    def commit(self):
        return {"lines": self.lines}

    def close(self):
        raise OSError("it does not even close")
'''


@pytest.fixture
def faulty(tmp_path: Path) -> str:
    """PYTHONPATH with the package that brings such a logger."""
    package = tmp_path / "packages" / "faulty" / "logger"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "faulty.py").write_text(FAULTY)
    about = package.parents[1] / "faulty-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    points = "[trainctl.options]\nlogger.faulty = faulty.logger.faulty:SPEC\n"
    (about / "entry_points.txt").write_text(points)
    return str(package.parents[1])


def order(run: RunPaths, *names: str) -> None:
    folder = run.root / "faulty"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for name in names:
        (folder / name).touch()


def test_a_logger_that_refuses_is_tried_again_until_it_does_not(
    tmp_path: Path, faulty: str
) -> None:
    run = new_run(tmp_path)
    order(run, "raise")
    with EventWriter(run.events, 1) as events, following(run, "faulty", PYTHONPATH=faulty) as told:
        events.write("step", step=1, loss=1.0)
        problem = "ConnectionError: the server refuses"
        wait_for(lambda: cursor(run, "faulty")["problem"] == problem)
        assert cursor(run, "faulty")["points"] == 0 and told.poll() is None
        order(run)
        wait_for(lambda: cursor(run, "faulty")["points"] == 1)
        assert cursor(run, "faulty")["problem"] == ""
        order(run, "raise")
        events.write("step", step=2, loss=1.0)
        assert end(told) == 4 and cursor(run, "faulty")["problem"] == problem
    order(run)
    assert send(run, "faulty", PYTHONPATH=faulty)[0] == 0
    assert cursor(run, "faulty")["state"] == {"lines": [[1, 1], [2, 2]]}


def test_a_logger_that_hangs_or_ends_its_process_goes_on_where_it_was(
    tmp_path: Path, faulty: str
) -> None:
    run = new_run(tmp_path)
    with EventWriter(run.events, 1) as events:
        events.write("step", step=1, loss=1.0)
        assert send(run, "faulty", PYTHONPATH=faulty)[0] == 0
        events.write("step", step=2, loss=1.0)
        order(run, "hang")
        with following(run, "faulty", PYTHONPATH=faulty):
            wait_for((run.root / "faulty" / "hangs").exists)
            code, _ = send(run, "faulty", PYTHONPATH=faulty)
            assert code == 5, "two at a time"
        order(run, "exit")
        assert send(run, "faulty", PYTHONPATH=faulty)[0] == 3
        order(run)
        events.write("step", step=1, loss=1.0)
        assert send(run, "faulty", PYTHONPATH=faulty)[0] == 0
    assert cursor(run, "faulty")["state"] == {"lines": [[3, 1]]}


def test_a_full_disk_is_a_problem_like_any_other(tmp_path: Path) -> None:
    """RLIMIT_FSIZE fails in the middle of a write, as a full disk does."""
    run = new_run(tmp_path)
    records = list(draw(5, 400))
    append(run, iter(records[:100]))
    assert send(run, "table") == (0, "")
    append(run, iter(records[100:]))
    size = (run.root / "table" / "train.csv").stat().st_size + 1000
    limited = f"import resource, runpy, signal, sys; sys.argv = ['', {str(run.root)!r}, 'table']\n"
    limited += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    limited += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))\n"
    limited += "runpy.run_module('trainctl.monitor.loggers', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True)
    assert done.returncode == 4 and cursor(run, "table")["problem"].startswith("OSError")
    assert send(run, "table") == (0, "")
    check(run)


def test_a_logger_that_is_not_there_is_reported(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(6, 3))
    code, _ = send(run, "faulty")
    assert code == 4
    assert cursor(run, "faulty")["problem"].startswith("logger has no kind 'faulty' here")
