"""`runs ls|status|logs|stop|rm|attach` by the directory alone; a lock stands in for a launch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import small_checkpoints

from trainctl.cli.main import run
from trainctl.cli.record_lines import event_lines
from trainctl.config.compose import compose
from trainctl.errors import ExitCode
from trainctl.hardware import resolve_hardware
from trainctl.monitor.report.document import report_document
from trainctl.monitor.report.history import History
from trainctl.monitor.report.marks import mark_of
from trainctl.monitor.report.runs_folder import RunsFolder
from trainctl.rules.resolve import resolve
from trainctl.runs.command import AttemptCommand, NodeCommand, write_command
from trainctl.runs.directory import create_run, new_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import ResumePoint, summarise_run
from trainctl.runs.logs import LogFollower
from trainctl.runs.records import EventWriter
from trainctl.runs.status import (
    Request,
    SchedulerJob,
    State,
    Status,
    is_requested,
    read_status,
    write_job,
    write_status,
)

HOSTS = ("node-a", "node-b")
HOLD = """
import sys, time
from pathlib import Path
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.status import State, read_status, write_status
run = RunPaths(Path(sys.argv[1]))
with hold_lock(run):
    print("held", flush=True)
    while not (found := sorted(path.name for path in run.requests.glob("[a-z]*"))):
        time.sleep(0.02)
    write_status(run, read_status(run).changed(State.stopped, exit_code=0, message=f"got {found}"))
"""
FOR_EVER = HOLD.partition("    while")[0] + "    time.sleep(600)\n"


def make_run(path: Path, state: State | None = State.running, stop_after: int = 50) -> RunPaths:
    """Make a run of two nodes with two ranks each, at step 7 of 160. The launch stops at
    `stop_after`.
    """
    config = compose(["recipe=tiny", f"training.stop_after_steps={stop_after}"]).config
    paths = create_run(config, run_dir=path)
    attempt = new_attempt(paths, resolve(config, resolve_hardware(config.hardware)).plan)
    nodes = tuple(
        NodeCommand(node=i, host=host, argv=("a",), environment={}) for i, host in enumerate(HOSTS)
    )
    write_command(attempt, AttemptCommand(nodes=nodes, ranks_per_node=2, rank_command=("r",)))
    for rank in range(4):
        attempt.rank_log(rank).write_text(f"line of rank {rank}\n\x1b[31mred\n")
    if state is not None:
        status = Status(state=state, attempt=1, host="login", pid=1, started=1.0, updated=2.0)
        write_status(paths, status)
        with EventWriter(paths.events, 1) as events:
            for step in range(1, 8):
                events.write(
                    "step", step=step, loss=8.0 - step, learning_rate=1e-3, tokens_per_second=10.0
                )
    return paths


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path / "runs" / "r")


@contextmanager
def held(paths: RunPaths, program: str = HOLD) -> Iterator[None]:
    """Another process holds the run, and ends when it is asked to."""
    command = [sys.executable, "-c", program, str(paths.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield
        finally:
            process.kill()


def read_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def fail(paths: RunPaths, rank: int, message: str, **more: Any) -> None:
    with EventWriter(paths.events, 1) as events:
        events.write(
            "failure",
            rank=rank,
            node=rank // 2,
            host=HOSTS[rank // 2],
            pid=4,
            cause="code",
            exit_code=1,
            signal=None,
            message=message,
            hint="",
            log=str(paths.attempt(1).rank_log(rank)),
            log_tail=["ValueError: boom"],
            **more,
        )


def test_a_run_that_stop_after_steps_ended_is_not_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = make_run(tmp_path / "runs" / "r", State.finished, stop_after=7)
    assert str(summarise_run(paths)).startswith("stopped, step 7 of 160")
    (row_of_folder,) = RunsFolder(paths.root.parent).look()[1]["runs"]
    history = History(paths)
    history.read()
    (page,) = report_document([history])["runs"]
    for shown in (row_of_folder, page):
        assert (shown["state"], shown["step"], shown["total_steps"]) == ("stopped", 7, 160)
    assert run(["runs", "ls"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[:3] == ["r", "stopped", "7/160"]
    assert run(["runs", "status", "runs/r"]) == 0
    said = capsys.readouterr().out
    assert "state: stopped" in said and "progress: step 7 of 160" in said
    assert "training.stop_after_steps ended it; `trainctl resume` goes on" in said
    assert run(["runs", "ls", "--json"]) == 0
    (found,) = read_json(capsys)["runs"]
    assert (found["step"], found["stop_step"], found["total_steps"]) == (7, 7, 160)


def test_lost_steps_are_those_of_the_newest_attempt(paths: RunPaths) -> None:
    small_checkpoints.save(paths, 3)
    assert ResumePoint.of(paths).sentence(paths).endswith("continues from step 3: 4 steps are lost")
    plan = read_plan(paths.attempt(1).plan)
    new_attempt(paths, plan)  # resume --step 3 leaves steps 4 to 7 behind
    assert ResumePoint.of(paths) == ResumePoint(3, 0)
    with EventWriter(paths.events, 2) as events:
        events.write("step", step=4, loss=4.0, learning_rate=1e-3, tokens_per_second=10.0)
    assert ResumePoint.of(paths) == ResumePoint(3, 1)


def test_the_reason_of_a_callback_that_ends_the_run_is_shown() -> None:
    end = {"event": "end", "step": 7, "reason": "callback", "callback": "score", "why": "enough"}
    assert event_lines(end) == ["ended at step 7 by the callback score: enough"]
    mark = mark_of({**end, "attempt": 1, "time": 0.0}, 7)
    assert mark is not None and "the callback score: enough" in str(mark.to_json())
    former = {**end, "callback": None}
    del former["why"]
    assert event_lines(former) == ["ended at step 7 by a callback"]


def test_ls_tells_states_apart(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = make_run(tmp_path / "runs" / "q", State.queued)
    write_job(
        queued.attempt(1), SchedulerJob(kind="slurm", id="4711_3", submitted=1.0, host="login")
    )
    make_run(tmp_path / "runs" / "n", None)
    make_run(tmp_path / "runs" / "f", State.finished)
    with held(paths):
        assert run(["runs", "ls", "--json"]) == 0
        rows = {Path(row["path"]).name: row for row in read_json(capsys)["runs"]}
    assert {name: row["state"] for name, row in rows.items()} == {
        "r": "running",
        "q": "queued",
        "n": "new",
        "f": "finished",
    }
    assert (rows["r"]["step"], rows["r"]["stop_step"], rows["r"]["loss"]) == (7, 50, 1.0)
    assert rows["q"]["job"] == "4711_3" and rows["n"]["step"] == 0
    assert run(["runs", "ls", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("r ") and " lost " in line and " 7/160 " in line for line in lines)
    assert any(line.startswith("q ") and "4711_3" in line for line in lines)


HALF_WRITTEN = (
    b"",
    b"{",
    b"[]",
    b"null",
    b"\xff\xfe",
    b'{"id": "x", "created": "yesterday"}',
    b'{"id": "x", "created": 1.0, "mesh": 5, "stop_step": "many", "hardware": {"nodes": []}}',
    b'{"event": "step", "step": null, "loss": {}, "time": "late", "attempt": 1}\n',
    b'{"state": "running", "attempt": "one"}',
)


def test_ls_is_not_kept_from_a_run_by_what_lies_beside_it(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run.json", "config.yaml", "status.json", "events.jsonl", "lock", "attempts"):
        other = make_run(tmp_path / "runs" / f"no-{name}")
        shutil.rmtree(other.root / name, ignore_errors=True)
        (other.root / name).unlink(missing_ok=True)
        (other.root / name).symlink_to(name)  # a loop: no look at it succeeds
    for number, content in enumerate(HALF_WRITTEN):
        other = make_run(tmp_path / "runs" / f"half-{number}")
        for path in (other.record, other.status, other.events, other.attempt(1).plan, other.lock):
            if path != other.record or number > 4:
                path.write_bytes(content)
        (other.attempts / "\N{SUPERSCRIPT TWO}").mkdir()
    damaged = make_run(tmp_path / "runs" / "damaged")
    damaged.record.write_text("{")
    (tmp_path / "runs" / "file").write_text("")
    (tmp_path / "runs" / "link").symlink_to("nowhere")
    assert run(["runs", "ls", "--json"]) == 0
    shown = capsys.readouterr()
    names = {Path(row["path"]).name for row in json.loads(shown.out)["runs"]}
    assert {"r", "no-status.json", "no-events.jsonl", "no-lock", "half-0", "half-6"} <= names
    assert "damaged" not in names and f"left out: {damaged.record} cannot be read" in shown.err
    assert run(["runs", "ls"]) == 0


def test_ls_and_status_where_nothing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["runs", "ls"]) == 0
    assert "there is no run" in capsys.readouterr().err
    assert run(["runs", "ls", "elsewhere"]) == ExitCode.run_state
    assert run(["runs", "status"]) == ExitCode.run_state


def test_status_and_logs_name_the_first_failure(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    fail(paths, 3, "ended with exit code 1: ValueError: boom")
    fail(paths, 0, "lost the connection")
    assert run(["runs", "status", str(paths.root)]) == 0
    out = capsys.readouterr().out
    assert "first failure: rank 3 (node 1, node-b, process 4) ended with exit code 1" in out
    assert (
        "progress: step 7 of 160 (this launch ends at 50)" in out
        and "lost the connection" not in out
    )
    cut_off = make_run(paths.root.parent / "z", State.failed)
    fail(cut_off, 1, "has not heard its launcher", launcher_lost=True)
    fail(cut_off, 2, "was lost")
    assert run(["runs", "status", str(cut_off.root)]) == 0
    assert "first failure: rank 2" in capsys.readouterr().out
    assert run(["runs", "logs", str(paths.root)]) == 0
    out = capsys.readouterr().out
    first, *rest = out.splitlines()
    assert first.startswith("first failure: rank 3") and rest[0] == "  ValueError: boom"
    heads = [line.partition(":")[0] for line in rest if line.startswith("==>")]
    assert heads == [
        "==> records",
        "==> rank 0 on node-a",
        "==> rank 1 on node-a",
        "==> rank 2 on node-b",
        "==> rank 3 on node-b",
    ]
    assert "\x1b" not in out
    # Also of a run without a terminal, whose launcher showed them to nobody.
    assert "step 7/50 loss 1.0000 lr 1.0e-03 10 tokens/s\n" in out
    assert run(["runs", "logs", str(paths.root), "--rank", "2", "--lines", "2"]) == 0
    out = capsys.readouterr().out
    assert "line of rank 2" in out and "rank 3" not in out
    assert run(["runs", "logs", str(paths.root), "--attempt", "9"]) == ExitCode.run_state
    assert "attempts: 1 to 1" in capsys.readouterr().err


def test_status_names_ranks_that_are_still_slow(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"slow": True, "factor": 2.1, "part": "data", "seconds": 0.42, "usual_seconds": 0.2}
    with EventWriter(paths.events, 1) as events:
        for rank, state in ((3, slow), (1, slow), (1, {"slow": False})):
            place = {"rank": rank, "node": rank // 2, "host": HOSTS[rank // 2], "step": 1030}
            events.write("straggler", **place, **state)
    assert run(["runs", "status"]) == 0
    out = capsys.readouterr().out
    assert (
        "slow: rank 3 (node 1, node-b) takes 2.10 times as long as its peers up to step 1,030, and "
        "all wait for it; most of it in data (its loader): 0.42 s a step instead of 0.2 s\n"
    ) in out
    assert "rank 1" not in out
    assert run(["runs", "status", "--json"]) == 0
    assert [event["rank"] for event in read_json(capsys)["stragglers"]] == [3]
    new_attempt(paths, read_plan(paths.attempt(1).plan))
    assert run(["runs", "status"]) == 0
    assert "slow" not in capsys.readouterr().out  # the next attempt's ranks are other processes


def test_status_tells_what_was_compiled_anew(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"step": 5, "part": "step", "ranks": [0, 1], "graphs": 2, "seconds": 6.25}
    shapes = {"shape": [4, 128], "shape_before": [8, 64], "gave_up": False}
    with EventWriter(paths.events, 1) as events:
        for times, reason in ((1, None), (3, "size \x1b[2J mismatch")):
            events.write("recompilation", **told, **shapes, reason=reason, times=times)
    assert run(["runs", "status"]) == 0
    assert (
        "compiler: step 5: 2 ranks compiled 2 graphs anew for micro-batches of 4 x 128 instead of "
        "8 x 64, 6.25 s; 3 steps of this attempt did: size "
    ) in (out := capsys.readouterr().out)
    assert "\x1b" not in out
    assert run(["runs", "status", "--json"]) == 0
    assert read_json(capsys)["recompilation"]["times"] == 3


def test_records_that_are_missing_are_reported(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A truncated events file must not look like a run that finished early."""
    about = {"attempt": 1, "host": "login", "pid": 1, "started": 1.0, "updated": 2.0}
    write_status(paths, Status(state=State.finished, exit_code=0, **about))
    assert run(["runs", "status", "runs/r"]) == 0
    told = "records are missing in events.jsonl: they end at step 7, and the run finished"
    assert told in capsys.readouterr().out
    assert run(["runs", "ls", "runs"]) == 0
    assert "7/160 (records are missing)" in capsys.readouterr().out

    with EventWriter(paths.events, 1) as events:
        events.write("end", step=7, reason="no_improvement")
    assert run(["runs", "status", "runs/r"]) == 0
    assert "records are missing" not in capsys.readouterr().out


def test_records_that_end_before_a_checkpoint_are_said_to(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    small_checkpoints.save(paths, 9)
    assert run(["runs", "status", "runs/r", "--json"]) == 0
    found = read_json(capsys)["missing_records"]
    assert found == "they end at step 7, before the checkpoint of step 9"


def test_logs_follow_until_the_run_ends(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    log = paths.attempt(1).rank_log(2)

    def write_and_end() -> None:
        time.sleep(0.5)
        with log.open("a") as stream:
            stream.write("late")
            stream.flush()
            time.sleep(0.3)
            stream.write(" words\n")
        paths.attempt(1).rank_log(9).write_text("a new log\n")
        paths.requests.mkdir(exist_ok=True)
        (paths.requests / "stop").write_text("{}")

    thread = threading.Thread(target=write_and_end)
    with held(paths):
        thread.start()
        assert run(["runs", "logs", "--follow", "--lines", "1"]) == 0
    thread.join()
    lines = capsys.readouterr().out.splitlines()
    assert "rank 2 on node-b: late words" in lines
    assert "rank 9: a new log" in lines


def test_logs_cut_lines_without_an_end_and_say_so(
    paths: RunPaths, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = paths.attempt(1).rank_log(0)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    follower = LogFollower(paths.attempt(1), [0])
    log.write_bytes(b"a" * 2_500_000 + b"\nshort\n" + b"b" * 1_500_000)
    lines = [line for _ in range(6) for _, line in follower.poll()]
    assert lines == ["a" * 1_000_000 + " [cut: the line has 2,500,000 characters]", "short"]
    with log.open("ab") as stream:
        stream.write(b"\n")
    ((_, line),) = follower.poll()
    assert line == "b" * 1_000_000 + " [cut: the line has 1,500,000 characters]"
    with EventWriter(paths.events, 1) as writer:
        writer.write("corpus", message="c" * 3_000_000)
    assert run(["runs", "logs", str(paths.root)]) == 0
    out = capsys.readouterr().out
    assert "cccc [cut: the line has 3,000,000 characters]" in out and len(out) < 1_100_000
    assert f"{'b' * 500} [cut]" in out


@pytest.mark.parametrize(("flags", "request_name"), [([], "stop"), (["--now"], "end")])
def test_stop_asks_and_waits(
    flags: list[str], request_name: str, paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    with held(paths):
        assert run(["runs", "stop", str(paths.root), *flags]) == 0
    assert f"stopped, got ['{request_name}']" in capsys.readouterr().out
    assert run(["runs", "stop", str(paths.root)]) == ExitCode.run_state
    assert "not running" in capsys.readouterr().err


def test_stop_takes_a_queued_job_from_its_queue(
    paths: RunPaths,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queued = make_run(tmp_path / "runs" / "q", State.queued)
    write_job(queued.attempt(1), SchedulerJob(kind="slurm", id="4711", submitted=1.0, host="login"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["runs", "stop", str(queued.root)]) == ExitCode.environment
    assert "scancel is not installed" in capsys.readouterr().err
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\n')
    (tmp_path / "scancel").chmod(0o755)
    assert run(["runs", "stop", str(queued.root)]) == 0
    assert (tmp_path / "called").read_text() == "-- 4711\n"
    assert "stopped, job 4711 is cancelled" in capsys.readouterr().out
    assert not is_requested(queued, Request.stop)
    # Cancelled by hand, and forgotten by Slurm since.
    refusal = "scancel: error: Kill job error on job id 4711: Invalid job id specified"
    (tmp_path / "scancel").write_text(f"#!/bin/sh\necho '{refusal}' >&2\nexit 1\n")
    before = read_status(queued)
    assert before is not None
    write_status(queued, before.changed(State.queued))
    assert run(["runs", "stop", str(queued.root)]) == 0
    assert run(["runs", "rm", str(queued.root)]) == 0


def test_rm_refuses_what_is_used_and_what_is_worth_something(
    paths: RunPaths, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    queued = make_run(tmp_path / "runs" / "q", State.queued)
    write_job(queued.attempt(1), SchedulerJob(kind="slurm", id="4711", submitted=1.0, host="login"))
    with held(paths):
        assert run(["runs", "rm", str(paths.root)]) == ExitCode.run_state
    assert "stop it first" in capsys.readouterr().err
    assert run(["runs", "rm", str(paths.root), str(queued.root)]) == ExitCode.run_state
    assert paths.root.exists() and queued.root.exists()
    assert run(["runs", "rm", str(tmp_path)]) == ExitCode.run_state  # not a run
    assert run(["runs", "rm", str(paths.root)]) == 0
    assert not paths.root.exists()


def test_attach_shows_the_past_and_what_comes(
    paths: RunPaths, capsys: pytest.CaptureFixture[str]
) -> None:
    def go_on() -> None:
        time.sleep(0.5)
        with EventWriter(paths.events, 1) as events:
            events.write("step", step=8, loss=0.5, learning_rate=1e-3, tokens_per_second=10.0)
        paths.requests.mkdir(exist_ok=True)
        (paths.requests / "stop").write_text("{}")

    thread = threading.Thread(target=go_on)
    with held(paths):
        thread.start()
        assert run(["runs", "attach", "--json"]) == 0
    thread.join()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    lost = make_run(paths.root.parent / "z", State.running)
    assert run(["runs", "attach", str(lost.root)]) == ExitCode.run_state
    assert "ended at one blow" in capsys.readouterr().err
    with EventWriter(lost.events, 1):
        write_status(
            lost,
            Status(
                state=State.failed, attempt=1, host="", pid=1, started=1, updated=2, exit_code=137
            ),
        )
    assert run(["runs", "attach", str(lost.root)]) == 137


def test_stop_now_does_not_wait_for_ever_for_what_nothing_ends(
    paths: RunPaths, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Signals may not reach the lock's holder: it hangs in the kernel or runs in another
    container.
    """
    grace = read_plan(paths.attempt(1).plan).config.launcher.grace_seconds
    monkeypatch.setattr("trainctl.launchers.stop._KILL_PATIENCE_SECONDS", 0.2 - grace)
    monkeypatch.setattr("trainctl.launchers.stop._FORCE_PATIENCE_SECONDS", 0.2)
    with held(paths, FOR_EVER):
        assert run(["runs", "stop", "--now", str(paths.root)]) == ExitCode.run_state
    assert "does not end: process" in capsys.readouterr().err


def test_every_run_is_removed_although_nobody_reads_of_it(tmp_path: Path) -> None:
    names = [str(make_run(tmp_path / name, None).root) for name in ("a", "b", "c")]
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "trainctl", "runs", "rm", *names]
    done = subprocess.run(command, stdout=writer, stderr=writer)
    os.close(writer)
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
