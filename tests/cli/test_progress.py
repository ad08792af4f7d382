"""Tests of what a launch prints for each record, in a terminal and elsewhere."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from trainctl.cli.progress import Activity, LiveFollower, LiveLine, Progress
from trainctl.cli.record_lines import clock, event_lines, record_lines, step_line
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import Heartbeat, Phase


def step(number: int, time: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "attempt": 1,
        "time": time,
        "event": "step",
        "step": number,
        "loss": 2.81234,
        "learning_rate": 9.1e-4,
        "grad_norm": 0.8123,
        "tokens": number * 4096,
        "tokens_per_second": 12345.4,
        "samples": [0, 16],
    } | more


def test_a_step_line_has_every_number() -> None:
    assert step_line(step(20), stop_step=200, seconds_left=12.2) == (
        "step 20/200 loss 2.8123 lr 9.1e-04 grad_norm 0.81 12,345 tokens/s eta 00:12"
    )


def test_the_reward_is_shown_beside_the_loss() -> None:
    line = step_line(step(2, objective={"reward": 0.25}), stop_step=9, seconds_left=None)
    assert line.startswith("step 2/9 loss 2.8123 reward 0.2500 lr ")


def test_utilisation_is_shown_where_the_peak_is_known() -> None:
    assert " tokens/s MFU 41.2% eta" in step_line(
        step(1, mfu=0.4123), stop_step=2, seconds_left=None
    )
    assert "MFU" not in step_line(step(1, mfu=None), stop_step=2, seconds_left=None)


@pytest.mark.parametrize("other", [{"a": 1}, [], "x", None, True])
def test_a_record_of_another_form_keeps_no_other_from_view(other: Any) -> None:
    """Changed by hand, or written by another version: read after the fact it is named."""
    evaluation = {"event": "evaluation", "step": 2, "loss": 2.5, "sources": {"a": 1.0}}
    for event in (step(1, mfu=0.4, values={"f1": 0.5}), evaluation):
        for name in event.keys() - {"event"}:
            (line,) = record_lines({**event, name: other}, stop_step=2)
            assert line.isprintable()
    (line,) = record_lines({"event": "step", "step": 1, "loss": {"\x1b[2J": 1}}, stop_step=2)
    assert line.startswith("a record that is not as this version writes it: {'event': 'step'")
    assert record_lines({"event": "evaluation"}, stop_step=2)


@pytest.mark.parametrize(
    ("gibibytes", "at_end", "shown"), [(4, True, True), (4, False, False), (7, False, True)]
)
def test_memory_is_shown_at_the_end_or_when_it_is_more_than_planned(
    gibibytes: int, at_end: bool, shown: bool
) -> None:
    planned = {"device_peak_bytes": 5, "device_peak_low_bytes": 4, "device_peak_high_bytes": 6}
    event = {
        "event": "memory",
        "step": 2,
        "at_end": at_end,
        "measured": {"device_peak_bytes": gibibytes * 2**30},
        "planned": {name: size * 2**30 for name, size in planned.items()},
    }
    line = f"peak memory of a device: {gibibytes}.00 GiB; planned 5.00 (between 4.00 and 6.00)"
    assert event_lines(event) == ([line] if shown else [])


def test_a_step_without_clipping_has_no_norm() -> None:
    assert "grad_norm" not in step_line(step(1, grad_norm=None), stop_step=2, seconds_left=None)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "--:--"), (0, "00:00"), (59.6, "01:00"), (3600, "1:00:00"), (90061, "25:01:01")],
)
def test_clock(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_evaluation_has_the_entropy_beside_it() -> None:
    event = {"event": "evaluation", "step": 5, "loss": 1.5, "unigram_entropy": 3.25}
    (line,) = event_lines(event)
    assert line == ("evaluation at step 5: held-out loss 1.5000 (tokens' unigram entropy 3.2500)")
    (line,) = event_lines({**event, "sources": {"code": 1.25, "prose": "NaN"}})
    assert "held-out loss 1.5000, of code 1.2500, prose nan (tokens'" in line


def test_bad_text_is_counted_when_a_run_starts() -> None:
    event = {
        "event": "start",
        "resumed_from": None,
        "world_size": 2,
        "num_parameters": 1000,
        "train_tokens": 90_000,
        "held_out_tokens": 10_000,
        "passed_over": [],
    }
    assert len(event_lines(event)) == 1
    where = "a\x1b.jsonl:7: byte 0xff is not UTF-8"
    bad = {"replaced": 1, "skipped": 1200, "examples": [where]}
    line = event_lines({**event, "bad_text": bad})[-1]
    assert "1 document repaired, 1,200 documents left out" in line
    assert "\x1b" not in line and "jsonl:7" in line


def test_a_sample_keeps_its_lines() -> None:
    assert event_lines({"event": "sample", "text": "def f():\n    x"}) == [
        "sampled text:",
        "  def f():",
        "      x",
    ]


def test_plain_lines_come_at_the_interval_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress(stop_step=7, every_steps=3) as progress:
        for number in range(1, 8):
            progress(step(number, time=float(number)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["3/7", "6/7", "7/7"]
    assert lines[0].endswith("eta 00:04")


def test_an_evaluation_between_steps_lengthens_the_eta(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(stop_step=10, every_steps=1) as progress:
        for number, time in ((1, 0.0), (2, 1.0), (3, 12.0)):
            progress(step(number, time=time))
    # 1 s, then 0.9 x 1 s + 0.1 x 11 s = 2 s a step.
    assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()] == [
        "--:--",
        "00:08",
        "00:14",
    ]


def test_json_lines_carry_the_records_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    events = [step(1, loss=1 / 3), {"event": "end", "step": 1, "reason": "done"}]
    with Progress(stop_step=1, every_steps=10, as_json=True) as progress:
        for event in events:
            progress(event)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == events


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.mark.parametrize("as_json", [False, True])
def test_a_reader_that_goes_away_does_not_stop_the_run(
    as_json: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    with Progress(stop_step=2, every_steps=1, as_json=as_json) as progress:
        progress(step(1))
        progress(step(2))


def test_a_sample_cannot_steer_the_terminal() -> None:
    assert event_lines({"event": "sample", "text": "a\x1b[2Jb"})[1] == "  a\ufffd[2Jb"


def test_a_nan_loss_is_shown() -> None:
    assert "loss nan" in step_line(step(1, loss="NaN"), stop_step=2, seconds_left=None)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "step 7: loss 21.5311 above 8.2 on rank 1 (samples 96 to 104): skip_batch"),
        (
            {"kind": "loss_not_finite", "value": "NaN", "limit": None, "ranks": [0, 1]},
            "step 7: loss nan on rank 0, 1 (samples 96 to 104): skip_batch",
        ),
        (
            {"kind": "norm_spike", "ranks": [], "policy": "rewind", "to_step": 4},
            "step 7: gradient norm 21.5311 above 8.2 (samples 96 to 104): rewind to step 4",
        ),
    ],
)
def test_an_intervention_is_one_line(changes: dict[str, Any], line: str) -> None:
    event = {
        "event": "intervention",
        "step": 7,
        "kind": "loss_spike",
        "value": 21.5311,
        "limit": 8.2,
        "policy": "skip_batch",
        "samples": [96, 104],
        "ranks": [1],
        "suspects": [98, 99],
        "in_a_row": 0,
    }
    assert event_lines(event | changes) == [line]


def build(seconds: float | None) -> dict[str, Any]:
    return {"event": "build", "operator": "cpu_adam", "seconds": seconds, "host": "node-a"}


def test_a_build_is_reported_when_it_begins_and_when_it_ends() -> None:
    (line,) = event_lines(build(None))
    assert line.startswith("DeepSpeed compiles cpu_adam on node-a")
    assert event_lines(build(38.4)) == ["compiled cpu_adam in 38 s"]


def test_a_blocked_logger_and_its_recovery_are_reported() -> None:
    event = {"event": "logger", "name": "csv", "problem": "OSError: no space"}
    assert event_lines(event) == [
        "logger csv: OSError: no space; the run does not wait for it: `trainctl runs sync` sends "
        "what is missing"
    ]
    assert event_lines(event | {"problem": ""}) == ["logger csv: sends again"]


IN_A_TERMINAL = """
import os, sys
from trainctl.cli.progress import Progress
from test_progress import build, step
with Progress(stop_step=2, every_steps=1) as progress:
    for event in (build(None), build(38.4), step(1), step(2)):
        progress(event)
        print("next", file=sys.__stderr__, flush=True)
        sys.__stdin__.readline()
os._exit(6)
"""


def in_a_terminal(kind: str, *awaited: str) -> tuple[int, str]:
    """Exit code and output of a display in a terminal of 40 columns, once it shows what is awaited
    after each of the records; without anything awaited it is closed after the second one."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_A_TERMINAL],
        env={**os.environ, "TERM": kind, "PYTHONPATH": str(Path(__file__).parent)},
        stdin=subprocess.PIPE,
        stdout=end,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(end)
    output, deadline = b"", time.monotonic() + 120
    assert process.stdin is not None and process.stderr is not None
    for number in range(4):
        assert process.stderr.readline() == "next\n"
        while awaited and awaited[number].encode() not in output:
            left = deadline - time.monotonic()
            assert left > 0 and select.select([terminal], [], [], left)[0], output
            output += os.read(terminal, 65536)
        if not awaited and number == 1:
            os.close(terminal)
        process.stdin.write("\n")
        process.stdin.flush()
    process.communicate()
    if awaited:
        os.close(terminal)
    return process.returncode, output.decode(errors="replace")


def test_a_terminal_shows_that_something_is_compiled_and_then_steps() -> None:
    awaited = ("compiling cpu_adam", "compiled cpu_adam in 38 s", "step 1/2", "step 2/2")
    assert in_a_terminal("xterm-256color", *awaited)[0] == 6


def test_steps_stay_above_the_line_that_is_drawn_anew() -> None:
    """Each step is printed once in a row of its own, and nothing is wider than the terminal."""
    _, output = in_a_terminal("xterm-256color", "compiles", "compiled", "step 1/2", "step 2/2")
    for number in (1, 2):
        assert output.count(f"step {number}/2 loss 2.8123 lr 9.1e-04 grad_norm 0.81") == 1
    drawn = re.findall(r"\x1b\[J([^\r\x1b\n]+)(?=\r)(?!\r\n)", output)
    assert drawn and all(len(line) < 40 for line in drawn), drawn


class Terminal(io.StringIO):
    """One whose width is set from outside."""

    columns = 40

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        raise OSError


def test_a_line_is_erased_from_all_the_rows_that_a_narrower_terminal_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    width = {"is": 40}
    monkeypatch.setattr(LiveLine, "columns", property(lambda self: width["is"] - 1))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with LiveLine(terminal) as line:
        line.show("x" * 60)
        assert terminal.getvalue() == "x" * 39
        width["is"] = 15  # the 39 characters take three rows now
        line.show("y" * 60)
        assert terminal.getvalue() == "x" * 39 + "\r" + "\x1b[A" * 2 + "\x1b[J" + "y" * 14
        before = len(terminal.getvalue())
        print("a finding")
        assert terminal.getvalue()[before:] == "\r\x1b[Ja finding\n" + "y" * 14
    assert terminal.getvalue().endswith("\r\x1b[J")
    assert sys.stdout is terminal


def test_the_phase_between_records_is_shown_with_its_duration(tmp_path: Path) -> None:
    """Activities come from the heartbeats of the preparation and of rank 0."""
    run = RunPaths(tmp_path)
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    activity = Activity(run, 1)
    assert activity.now()[0] == "starting"
    Heartbeat(attempt.preparation).beat(Phase.start, doing="tokenizing: 1,234 documents")
    assert activity.now()[0] == "tokenizing: 1,234 documents"
    beat = Heartbeat(attempt.heartbeat(0)).beat
    assert activity.now()[0] == "loading torch and DeepSpeed"
    beat(Phase.start, doing="building the model and its engine")
    assert activity.now()[0] == "building the model and its engine"
    activity.see(build(None) | {"attempt": 1})
    assert activity.now()[0] == "compiling cpu_adam"
    activity.see(build(3.0))
    activity.see({"event": "start"})
    assert activity.now()[0] == "first step"
    activity.see(step(1))
    beat(Phase.step, 1)
    assert activity.now()[0] == ""
    for phase, doing, said in (
        (Phase.evaluate, "", "evaluating"),
        (Phase.save, "", "saving a checkpoint"),
        (Phase.end, "sampling text", "sampling text"),
        (Phase.end, "", "ending"),
    ):
        beat(phase, 1, doing)
        text, seconds = activity.now()
        assert text == said and 0 <= seconds < 60


def test_a_terminal_that_cannot_draw_a_line_anew_gets_plain_lines() -> None:
    code, output = in_a_terminal("dumb", "compiles", "compiled", "step 1/2", "step 2/2")
    assert code == 6 and "\x1b" not in output
    assert [line.split()[1] for line in output.splitlines() if line.startswith("step")] == [
        "1/2",
        "2/2",
    ]


def test_a_terminal_that_is_closed_does_not_change_how_a_launch_ends() -> None:
    assert in_a_terminal("xterm-256color") == (6, "")


def test_a_log_that_cannot_be_read_does_not_change_how_a_launch_ends(tmp_path: Path) -> None:
    run = RunPaths(tmp_path / ("x" * 300))  # as with a stale handle, every look fails
    with LiveFollower(run) as follower:
        follower({"event": "program", "attempt": 1})
