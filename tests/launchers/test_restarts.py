"""Tests of when a launch restarts by itself and when it gives up, with made-up attempts."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from supervised import make_plan

from trainctl.launchers import local
from trainctl.launchers import stop as stop_module
from trainctl.launchers.attempts import PreparedAttempt, run_with_restarts, supervise
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, Outcome
from trainctl.launchers.stop import StopHandler, TimeLimit
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import RunTag
from trainctl.runs.records import EventWriter
from trainctl.runs.status import Request, State, file_request, pending_requests, read_status

FAILED = Outcome(exit_code=137, state=State.failed, message="killed", is_transient=True)
FINAL = Outcome(exit_code=4, state=State.failed, message="port taken")
DONE = Outcome(exit_code=0, state=State.finished)


def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, *attempts: tuple[Outcome, int]
) -> tuple[Outcome, list[int], list[dict[str, Any]]]:
    """Outcome, numbers of the attempts and restart records, for attempts that end so, each with
    that newest checkpoint."""
    plan = make_plan(max_restarts=most)
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    saved, numbers, records = 0, [], []
    monkeypatch.setattr("trainctl.launchers.attempts._saved_step", lambda _: saved)

    def run_one(attempt: AttemptPaths, plan: RunPlan, stop: StopHandler) -> Outcome:
        nonlocal saved
        outcome, saved = attempts[len(numbers)]
        numbers.append(attempt.number)
        return outcome

    stop = StopHandler(run, stop_grace_seconds=0, limit=TimeLimit(None))
    first = new_attempt(run, plan)
    launch = LaunchRequest(run=run, attempt=first, plan=plan, on_event=records.append)
    outcome = run_with_restarts(launch, stop, run_one)
    return outcome, numbers, records


def test_it_goes_on_until_an_attempt_ends_well(tmp_path, monkeypatch):
    outcome, numbers, records = play(
        tmp_path, monkeypatch, 5, (FAILED, 10), (FAILED, 10), (DONE, 20)
    )
    assert outcome is DONE and numbers == [1, 2, 3]
    assert [(record["number"], record["of"], record["step"]) for record in records] == [
        (1, 5, 10),
        (2, 5, 10),
    ]
    assert records[0]["cause"] == "killed" and records[0]["event"] == "restart"


@pytest.mark.parametrize(("most", "outcome"), [(0, FAILED), (5, FINAL), (5, DONE)])
def test_a_run_is_not_restarted(tmp_path, monkeypatch, most, outcome):
    assert play(tmp_path, monkeypatch, most, (outcome, 10)) == (outcome, [1], [])


def test_the_number_of_restarts_is_bounded(tmp_path, monkeypatch):
    failures = [(FAILED, 10 * attempt) for attempt in range(1, 9)]
    outcome, numbers, _ = play(tmp_path, monkeypatch, 6, *failures)
    assert numbers == list(range(1, 8)) and outcome.exit_code == 137
    assert outcome.message == "killed; launcher.max_restarts=6 is used up"


def test_three_restarts_without_a_new_checkpoint_are_enough(tmp_path, monkeypatch):
    saved = (0, 10, 10, 10, 20, 20, 20, 20)
    outcome, numbers, _ = play(tmp_path, monkeypatch, 99, *((FAILED, step) for step in saved))
    assert len(numbers) == 8
    assert outcome.message == "killed; gave up: 3 restarts brought no new checkpoint"


def test_a_new_launch_takes_no_request_of_an_old_one(tmp_path):
    plan = make_plan()
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    file_request(run, Request.stop)
    with StopHandler(run, stop_grace_seconds=0, limit=TimeLimit(None)) as stop:
        assert not pending_requests(run) and not stop.is_stopping
        stop.check_time()
        assert not stop.is_stopping
    with StopHandler(run, stop_grace_seconds=0, limit=TimeLimit(1e-9)) as stop:
        stop.check_time()
        assert stop.save_reason == "the time limit" and pending_requests(run) == {Request.stop}
        assert not stop.was_signalled  # what Ray's launcher ends with 143 instead of 75


def test_a_launch_follows_what_was_asked_since_its_attempt_was_made(tmp_path):
    plan = make_plan()
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    file_request(run, Request.stop)
    time.sleep(0.02)
    new_attempt(run, plan)
    time.sleep(0.02)  # the launch is handed to another process, and somebody asks it meanwhile
    file_request(run, Request.end)
    with StopHandler(run, stop_grace_seconds=0, limit=TimeLimit(None)) as stop:
        assert pending_requests(run) == {Request.end}
        stop.check_time()
        assert stop.end_signal is signal.SIGTERM


@pytest.mark.parametrize(
    ("kinds", "saves"),
    [(["step"], True), ([], False), (["step", "failure"], False), (["step", "end"], False)],
)
def test_a_step_counts_from_the_moment_of_its_record(tmp_path, kinds, saves):
    """Nobody has looked into the file since it was written, as within 50 ms of the first step."""
    plan = make_plan()
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    with EventWriter(run.events, 1) as events:
        events.write("step", step=9, loss=1.0)  # of an attempt before
    with EventWriter(run.events, 2) as events:
        for kind in kinds:
            events.write(kind, step=10, loss=1.0)
    ended = []
    agents = SimpleNamespace(terminate=lambda: ended.append(True))
    with StopHandler(
        run, stop_grace_seconds=0, interrupt_grace_seconds=30, limit=TimeLimit(None)
    ) as stop:
        stop.forward_to(agents, RunTag("id", run.root, 2))
        signal.raise_signal(signal.SIGHUP)
        assert (stop.save_reason, bool(ended)) == (("SIGHUP", False) if saves else ("", True))
        assert stop.was_signalled
        assert pending_requests(run) == ({Request.stop} if saves else set())


@pytest.mark.parametrize("kinds", [["step"], []])
def test_a_second_signal_within_the_decision_about_the_first(tmp_path, kinds, monkeypatch):
    """`timeout` sends two: the second one interrupts the reading of the records."""
    plan = make_plan()
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    with EventWriter(run.events, 1) as events:
        for kind in kinds:
            events.write(kind, step=1, loss=1.0)
    read = stop_module.events_from_end

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return read(*args)

    monkeypatch.setattr(stop_module, "events_from_end", interrupted)
    ended = []
    agents = SimpleNamespace(terminate=lambda: ended.append(True))
    with StopHandler(
        run, stop_grace_seconds=0, interrupt_grace_seconds=30, limit=TimeLimit(None)
    ) as stop:
        stop.forward_to(agents, RunTag("id", run.root, 1))
        monkeypatch.setattr(stop_module, "terminate_processes", lambda *_, **__: ended.append(2))
        signal.raise_signal(signal.SIGINT)
        saves = bool(kinds)
        assert (stop.save_reason, stop.end_signal) == (
            ("SIGINT", None) if saves else ("", signal.SIGINT)
        )
        assert ended == ([] if saves else [True, 2])


def test_the_margin_of_a_time_limit_learns_from_the_records():
    step = {"event": "step", "attempt": 1}
    limit = TimeLimit(100.0, [{"event": "checkpoint", "attempt": 1, "seconds": 30.0}])
    assert limit.margin_seconds == 2 * 30 + 60
    for now, attempt in ((0.0, 1), (7.0, 1), (1000.0, 2), (1003.0, 2)):
        limit.observe({**step, "time": now, "attempt": attempt})
    assert limit.margin_seconds == 2 * (30 + 7) + 60, "not the time between two attempts"
    assert not limit.is_near() and not TimeLimit(None).is_near()
    near = TimeLimit((limit.margin_seconds + 1) / 60)
    near.observe({"event": "checkpoint", "seconds": 60.0})
    assert near.is_near()


def test_the_margin_counts_what_was_never_seen_by_its_estimate():
    limit = TimeLimit(60.0, save_seconds=100.0, step_seconds=20.0)
    assert limit.margin_seconds == 2 * (100 + 20) + 60
    assert limit.estimates == (
        "a save is taken to last 100 s and a step is taken to last 20 s, as none was seen yet"
    )
    for now in (0.0, 305.0):  # five minutes of an evaluation, which ends at its next batch
        seconds = {"evaluation": 300.0 if now else 0.0}
        limit.observe({"event": "step", "attempt": 1, "time": now, "seconds": seconds})
    limit.observe({"event": "checkpoint", "seconds": 7.0})
    assert (limit.margin_seconds, limit.estimates) == (2 * (7 + 5) + 60, "")
    assert TimeLimit(2.0, save_seconds=1e5).margin_seconds == 60, "half of the limit"


def test_a_step_that_once_hung_does_not_end_every_later_launch():
    steps = [{"event": "step", "attempt": 1, "time": time} for time in (0.0, 1.0, 8 * 3600.0)]
    limit = TimeLimit(60.0, steps)
    assert limit.margin_seconds == 1800 and not limit.is_near()
    limit.observe({"event": "checkpoint", "seconds": 1200.0})
    assert limit.margin_seconds == 2 * 1200 + 60, "a save is not cut short"


class Agents:
    """Agents that end after three looks; the run's status cannot be replaced until the second."""

    margin_seconds = 1.0
    returncode = 0

    def __init__(self, run, events):
        self.run, self.events, self.looks = run, events, 0

    def poll(self):
        self.looks += 1
        if self.looks == 1:
            self.run.status.unlink()
            self.run.status.mkdir()
            self.events.write("start", world_size=1)
        elif self.looks == 3:
            self.run.status.rmdir()
        return None if self.looks < 5 else 0


def test_a_status_that_cannot_be_written_for_a_moment_ends_no_run(tmp_path):
    plan = make_plan(1)
    run = create_run(plan.config, root=tmp_path, folder=tmp_path)
    request = AttemptRequest(
        plan=plan, run=run, attempt=new_attempt(run, plan), environment={}, cores=1
    )
    attempt = PreparedAttempt(request, local.render(request), RunTag("nobody", run.root, 1), 0)
    with EventWriter(run.events, 1) as events, StopHandler.for_launch(run, plan) as stop:
        outcome = supervise(attempt, lambda _: Agents(run, events), lambda _: None, stop)
    assert (outcome.exit_code, read_status(run).state) == (0, State.finished)
