"""Launches, runs and checkpoints by the Python API."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from commands import TINY
from made_runs import append, new_run
from small_recipe import write_small_tiny
from transformers import AutoModelForCausalLM

import trainctl as tc
from trainctl.errors import ExitCode
from trainctl.launchers import sweep
from trainctl.runs.directory import read_record
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import EventWriter
from trainctl.runs.step_table import step_files

SCRIPT = """
import sys, time
from trainctl import records
for step in range(1, {steps} + 1):
    records.log(step=step, loss=5.0 - step)
    time.sleep({pause})
if {steps} == 2:
    raise RuntimeError("the cause")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script(folder: Path, steps: int, pause: float = 0.0) -> tuple[str, ...]:
    """Return overrides of a run whose program records steps, and fails after two of them."""
    path = folder / f"train{steps}.py"
    path.write_text(SCRIPT.format(steps=steps, pause=pause))
    return f"script={path}", "hardware=cpu", "hardware.devices_per_node=1", "training.steps=9"


def in_thread(work: Any) -> Any:
    """Return what a function returns, or raise what it raises, in another thread."""
    found: dict[str, Any] = {}

    def call() -> None:
        try:
            found["result"] = work()
        except BaseException as error:
            found["error"] = error

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(120)
    if "error" in found:
        raise found["error"]
    return found["result"]


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_launch_is_waited_for_and_restores_the_signal_handlers(
    folder: Path, capfd: pytest.CaptureFixture[str], where: str
) -> None:
    seen: list[tc.api.Event] = []
    before = signal.getsignal(signal.SIGINT)
    call = lambda: tc.launch(*script(folder, 3), progress=seen.append)  # noqa: E731
    run = call() if where == "main" else in_thread(call)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr() == ("", ""), "nothing prints"
    assert [event["step"] for event in seen if event["event"] == "step"] == [1, 2, 3]
    assert (run.status.state, run.status.exit_code, run.status.step) == ("finished", 0, 3)
    assert run.path.parent == folder / "runs" and tc.list_runs() == [run] == [tc.Run.newest()]
    recorded = read_record(run.paths)["argv"]
    assert recorded[0] == "trainctl.launch" and "training.steps=9" in recorded
    assert sys.argv[0] not in recorded


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_run_that_fails_raises_with_its_cause(folder: Path, where: str) -> None:
    call = lambda: tc.launch(*script(folder, 2), run_dir="runs/a")  # noqa: E731
    with pytest.raises(tc.RunFailed, match="rank 0") as failed:
        call() if where == "main" else in_thread(call)
    error = failed.value
    assert error.exit_code == ExitCode.training_failed and error.path == folder / "runs" / "a"
    assert any("the cause" in line for line in error.log_tail)
    assert "the cause" in "".join(error.__notes__)
    status = tc.Run("runs/a").status
    assert status.state == "failed" and status.failure is not None
    assert status.failure["cause"] == error.cause
    tail = tc.Run("runs/a").logs()
    assert any("the cause" in line for lines in tail.values() for line in lines)


def test_a_callback_that_raises_ends_the_launch(folder: Path) -> None:
    def refuse(event: tc.api.Event) -> None:
        if event["event"] == "step":
            raise ValueError("enough")

    for call in (lambda work: work(), in_thread):
        with pytest.raises(ValueError, match="enough"):
            call(lambda: tc.launch(*script(folder, 900, 0.1), progress=refuse))
        run = tc.list_runs()[-1]
        assert run.wait(timeout=30).state in ("failed", "stopped") and run.status.step < 50


def test_ctrl_c_ends_the_launch(folder: Path) -> None:
    def interrupt(event: tc.api.Event) -> None:
        if event["event"] == "step":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="SIGINT"):
        tc.launch(*script(folder, 900, 0.1), progress=interrupt)
    status = tc.Run.newest().status
    assert (status.state, status.exit_code) == ("stopped", 130) and status.step < 50


def test_a_run_in_the_background_outlives_its_caller(folder: Path) -> None:
    overrides = script(folder, 3)
    code = f"import trainctl as tc; tc.launch(*{overrides!r}, run_dir='runs/a', wait=False)"
    command = [sys.executable, "-W", "ignore::UserWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert tc.Run("runs/a").wait(timeout=60).state == "finished"


def test_a_launch_in_the_background_is_followed_and_stopped(folder: Path) -> None:
    started = time.monotonic()
    run = tc.launch(*script(folder, 900, 0.1), run_dir="runs/a", wait=False)
    assert time.monotonic() - started < 60 and run.status.exit_code is None
    with pytest.raises(TimeoutError):
        run.wait(timeout=0)
    with pytest.raises(tc.TrainctlError, match="is in use"):
        tc.resume(run)
    for event in run.follow():
        if event["event"] == "step" and event["step"] == 3:
            break
    assert run.status.state in ("starting", "running")
    assert run.stop().state == "stopped" and not run._is_live()
    assert next(run.follow())["event"] == "launch", "also of one that has ended"
    steps = [event["step"] for event in run.events("step")]
    assert run.metrics()["step"].tolist() == steps
    assert run.stop() == run.status, "nothing happens to a run that has ended"


def test_what_is_refused_makes_nothing(folder: Path) -> None:
    cases: list[tuple[tuple[Any, ...], int]] = [
        (("tiny", "optimizer.lr=-1"), ExitCode.bad_input),
        (("tiny", "data=text", "data.paths=[gone.txt]"), ExitCode.bad_input),
        (("tiny", "model.num_layers=4000", "model.hidden_size=2048"), ExitCode.does_not_fit),
        ((tc.plan("tiny"), "training.steps=3"), ExitCode.bad_input),
    ]
    for start in ("tiny", tc.plan("tiny")):
        with pytest.raises(tc.TrainctlError):
            tc.launch(start, hardware="900x8xh100-80g")  # not here
    with pytest.raises(tc.TrainctlError, match="the directory to look in"):
        tc.launch("tiny", resume=True)
    for arguments, code in cases:
        with pytest.raises(tc.TrainctlError) as refused:
            tc.launch(*arguments, run_dir="runs/a")
        assert refused.value.exit_code == code, arguments
    assert not (folder / "runs").exists()
    with pytest.raises(tc.TrainctlError, match="does not exist"):
        tc.Run("runs/a")


def repeated(attempts: list[range]) -> Any:
    for number, steps in enumerate(attempts, 1):
        for step in steps:
            yield {
                "event": "step",
                "attempt": number,
                "step": step,
                "loss": 5.0 / step + number,
                "learning_rate": 1e-3,
                "tokens": step * 10,
                "seconds": {"total": 0.5},
            }


def test_metrics_are_the_rows_that_count_of_the_csv_files(folder: Path) -> None:
    paths = new_run(folder / "run")
    append(paths, repeated([range(1, 8), range(5, 10)]))
    run = tc.Run("run")
    found = run.metrics()
    files = [pandas.read_csv(file.path) for file in step_files(paths.root / "steps")]
    first, second = files
    expected = pandas.concat([first[first["step"] < 5], second], ignore_index=True)
    assert found["step"].tolist() == expected["step"].tolist() == list(range(1, 10))
    for name in ("attempt", "loss", "learning_rate", "tokens"):
        assert found[name].tolist() == expected[name].tolist(), name
    assert found["seconds/total"].tolist() == expected["seconds.total"].tolist()
    assert found["step"].dtype == "int64"
    with EventWriter(paths.events, 2) as events:
        events.write("evaluation", step=9, loss=2.5)
    found = run.metrics()
    assert found["held_out/loss"].tolist()[-1] == 2.5
    table = run.metrics(as_="arrow")
    assert table.to_pandas().equals(found)
    assert len(tc.Run(new_run(folder / "empty").root).metrics()) == 0


def test_a_missing_package_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tc.Run(new_run(folder / "run").root)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(tc.TrainctlError, match="needs pyarrow") as missing:
        run.metrics(as_="arrow")
    assert missing.value.exit_code == ExitCode.environment


def test_a_run_shows_itself_in_a_notebook(folder: Path) -> None:
    paths = new_run(folder / "<b>&run")
    run = tc.Run(paths.root)
    assert "<svg" not in run._repr_html_(), "no curve of no steps"
    append(paths, repeated([range(1, 20)]))
    with EventWriter(paths.events, 1) as events:
        events.write("evaluation", step=10, loss=3.0)
    shown = run._repr_html_()
    assert "&lt;b&gt;&amp;run" in shown and "<b>&run" not in shown
    assert "<svg" in shown and "19 of 160" in shown
    assert "new, step 19 of 160, loss" in repr(run)
    with pytest.raises(tc.TrainctlError, match="cannot be written"):
        run.report("gone/page.html")
    page = run.report("page.html").read_text()
    assert page.startswith("<!doctype html>")
    document = json.loads(tc.report(run, form="json"))
    assert document["runs"][0]["step"] == 19


def test_a_lock_is_a_thread_s(folder: Path) -> None:
    paths = new_run(folder / "run")
    with hold_lock(paths), hold_lock(paths):
        with pytest.raises(tc.TrainctlError, match="in use by another launch"):
            in_thread(lambda: tc.resume("run"))


def test_a_wrong_choice_names_the_right_ones(folder: Path) -> None:
    run = tc.Run(new_run(folder / "run").root)
    newest = run.checkpoint()
    calls: list[tuple[Any, str]] = [
        (lambda: newest.export("out", dtype="float32"), "fp32, bf16, fp16"),
        (lambda: newest.evaluate(weights="mean"), "raw, ema"),
        (lambda: newest.sample("def", device="gpu"), "auto, cpu, cuda"),
        (lambda: tc.load("run", dtype="float32"), "fp32, bf16, fp16"),
        (lambda: tc.load(newest, step=3), "leave out step"),
        (lambda: run.metrics(as_="polars"), "pandas, arrow"),  # type: ignore[arg-type]
        (lambda: tc.report(run, form="pdf"), "html, json, csv"),  # type: ignore[arg-type]
    ]
    for call, right in calls:
        with pytest.raises(tc.TrainctlError, match=right):
            call()


def test_a_run_that_was_removed_can_be_shown(folder: Path) -> None:
    run = tc.Run(new_run(folder / "run").root)
    assert str(run.status) == "new, step 0 of 160"
    shutil.rmtree(run.path)
    assert "cannot be read" in repr(run)


def test_the_launchers_of_a_sweep_end_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [new_run(folder / name) for name in ("a", "b")]
    commands = {runs[0].root: ["sleep", "60"], runs[1].root: ["true"]}
    started: list[subprocess.Popen[bytes]] = []

    def start(run: RunPaths, *_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(commands[run.root]))
        return started[-1]

    def refuse(run: RunPaths, code: int) -> None:
        raise ValueError("enough")

    monkeypatch.setattr(sweep, "start_in_background", start)
    attempts = [(run, run.attempt(1)) for run in runs]
    with pytest.raises(ValueError, match="enough"):
        sweep.run_queue(attempts, parallel=2, on_end=refuse)
    assert [process.returncode for process in started] == [-signal.SIGTERM, 0]
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt, match="stopped by SIGINT"):
        sweep.run_queue(attempts[:1], parallel=1, on_end=lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_the_block_of_the_docs(folder: Path) -> None:
    plan = tc.plan(*TINY, "training.steps=100000", "checkpoint.every_steps=3")
    run = tc.launch(plan, run_dir="runs/a", wait=False)  # in the background; in a notebook too
    for event in run.follow():
        if event["event"] == "step" and event["step"] >= 4:
            break
    stopped = run.stop()
    assert stopped.state == "stopped" and stopped.checkpoint == stopped.step
    steps = stopped.step + 3
    tc.resume(run, f"training.steps={steps}")
    assert run.status.state == "finished" and run.status.step == steps
    metrics = run.metrics()
    assert metrics["step"].tolist() == list(range(1, steps + 1))
    assert metrics["attempt"].tolist()[-3:] == [2, 2, 2]

    tc.resume(run, from_start=False)  # nothing is left to do, and that is no error
    assert run.status.attempt == 2
    assert run.plan.with_("training.steps=7").diff(run.plan)
    newest = tc.Run("runs/a").checkpoints[-1]
    assert newest.step == steps and newest.is_complete and newest.verify() == []

    exported = newest.export("out", dtype="bf16")
    assert exported["out"] == str(folder / "out")
    bf16 = AutoModelForCausalLM.from_pretrained("out")
    for dtype, expected in ((None, torch.float32), ("bf16", torch.bfloat16)):
        model, tokenizer = tc.load("runs/a", dtype=dtype)
        assert model.dtype == expected and not model.training
        assert tokenizer.decode(tokenizer.encode("def f")) == "def f"
    assert type(model) is type(bf16)
    loaded, stored = model.state_dict(), bf16.state_dict()
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], stored[name]) for name in stored)
    losses = [tc.Run("runs/a").checkpoint(best=False).evaluate()["loss"], newest.evaluate()["loss"]]
    assert losses[0] == losses[1]


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_the_page_runs_as_printed(folder: Path) -> None:
    """All blocks of docs/python.md, with a recipe `tiny` that takes seconds."""
    write_small_tiny(folder, steps=20)
    page = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (folder / "page.py").write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, "page.py"], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    assert tc.Run("runs/a").status.step == 200
    assert (folder / "out" / "model.safetensors").is_file()
    assert (folder / "report.html").read_text().startswith("<!doctype html>")
