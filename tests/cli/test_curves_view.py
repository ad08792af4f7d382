"""`trainctl runs follow`: curves in a terminal, lines elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import numpy as np
import pytest

from trainctl.cli.curves_view import CURVES, average_in_buckets, render_screen, value_range
from trainctl.cli.main import run as command
from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.monitor.report.columns import GrowingColumns
from trainctl.monitor.report.history import History
from trainctl.rules.resolve import resolve
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import summarise_run
from trainctl.runs.records import EventWriter


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    config = compose(["recipe=tiny"]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    made = create_run(config, run_dir=tmp_path_factory.mktemp("runs") / "a")
    new_attempt(made, plan)
    with EventWriter(made.events, 1) as events:
        for step in range(1, 301):
            events.write(
                "step",
                step=step,
                loss=2 + 30 / step,
                grad_norm=float("nan") if step == 9 else 1.0,
                learning_rate=1e-3,
                tokens_per_second=1000.0 + step,
                mfu=None,
            )
        events.write("evaluation", step=300, loss=2.25)
    return made


def test_an_evaluation_without_a_loss_is_none(run: RunPaths) -> None:
    history = History(run)
    history.read()
    assert any(
        "held-out loss" in line for line in render_screen(history, summarise_run(run), 80, 24)
    )
    history.evaluations = GrowingColumns()
    history.evaluations.append({"step": 300.0, "time": 0.0})  # of a program of the user's
    assert not any(
        "nan" in line for line in render_screen(history, summarise_run(run), 80, 24)[-2:]
    )


@pytest.mark.parametrize(("columns", "rows"), [(200, 60), (130, 40), (80, 24), (40, 12), (10, 3)])
def test_the_picture_fits_and_shows_what_there_is_room_for(
    run: RunPaths, columns: int, rows: int
) -> None:
    history = History(run)
    history.read()
    lines = render_screen(history, summarise_run(run), columns, rows)
    assert len(lines) <= max(rows, 4) and max(map(len, lines)) <= columns
    text = "\n".join(lines)
    shown = [name for name in CURVES if f"{name.replace('_', ' ')} " in text]
    charts = sum("┌" in line for line in lines)
    if rows >= 12:
        assert lines[0].startswith("a: new, step 300 of 160"[: columns - 2]) and charts
        assert shown[0] == "loss" and (len(shown) == 4) == (columns >= 112)
        assert "loss 2.1" in text and "held-out loss 2.2500 at step 300"[: columns - 2] in text


def test_the_axis_range_ignores_the_first_steps() -> None:
    steps = np.arange(1.0, 1001)
    low, high = value_range(steps, 2 + 1000 / steps)
    assert low == 3 and 45 < high < 55
    assert value_range(steps[:3], np.full(3, 2.0)) == (1.0, 3.0)
    x, y = average_in_buckets(steps, np.where(steps == 7, np.nan, steps), 50)
    assert len(x) == 50 and np.array_equal(x, y) and np.isfinite(y).all()


def test_elsewhere_than_in_a_terminal_it_prints_lines(
    run: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["runs", "follow", str(run.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 21 and lines[-2].startswith("step 300/160 loss 2.1000")
    assert "\x1b" not in "".join(lines)


def test_in_a_terminal_the_last_picture_stays(run: RunPaths) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "trainctl", "runs", "follow", str(run.root)]
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    said = b""
    try:
        while piece := os.read(ours, 65536):
            said += piece
    except OSError:  # the other end is closed
        pass
    assert process.wait(30) == 0
    drawn, end, stays = said.partition(b"\x1b[?25h\x1b[?1049l")
    assert drawn.startswith(b"\x1b[?1049h\x1b[?25l") and end
    assert b"\x1b" not in stays and "⠉".encode() in stays and b"300 of 160" in stays
    assert re.search(rb"held-out loss 2.2500 at step 300", stays)
