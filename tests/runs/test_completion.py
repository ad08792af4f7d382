"""Runs that were killed when their work was done: every command that finds one says finished."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import append, new_run, other, step
from small_checkpoints import save

from trainctl import api
from trainctl.launchers.processes import settle_run
from trainctl.runs.completion import record_completion
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import read_events
from trainctl.runs.status import State, Status, read_status, write_status
from trainctl.runs.sweeps import SweepAction, _next_action

STEPS = 3


def killed(
    folder: Path, *overrides: str, state: State = State.running, **facts: object
) -> RunPaths:
    """Return a run whose processes were killed after its last save."""
    run = new_run(folder / "run", f"training.steps={STEPS}", *overrides)
    append(run, iter([other("launch", host="h", pid=1, ranks=2)]))
    append(run, (step(number) for number in range(1, STEPS + 1)))
    save(run, STEPS, attempt=1, **facts)
    began = Status.begin(state, 1)
    message = "rank 1 was killed by SIGKILL" if state is State.failed else ""
    write_status(run, began.changed(state, exit_code=137 if message else None, message=message))
    return run


@pytest.mark.parametrize("state", [State.running, State.failed, State.stopped])
def test_the_end_is_written_down_once(tmp_path: Path, state: State) -> None:
    run = killed(tmp_path, state=state)
    assert _next_action(run)[0] is SweepAction.resume
    assert settle_run(run) and not settle_run(run)
    found = read_status(run)
    assert found is not None and (found.state, found.exit_code) == (State.finished, 0)
    assert "all was saved when the attempt ended" in found.message
    assert ("SIGKILL" in found.message) == (state is State.failed), "why it died is kept"
    (end,) = read_events(run.events, "end")
    assert (end["attempt"], end["step"], end["reason"]) == (1, STEPS, "complete")
    assert _next_action(run)[0] is SweepAction.leave


def test_the_status_is_of_a_finished_run(tmp_path: Path) -> None:
    status = api.Run(killed(tmp_path).root).status
    assert (status.state, status.step, status.exit_code) == ("finished", STEPS, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("own_options")
def test_the_last_rows_of_the_table_are_written(tmp_path: Path) -> None:
    run = killed(tmp_path, "logging.to=[table]")
    append(run, iter([other("evaluation", step=STEPS, loss=2.5)]))
    settle_run(run)
    table = run.root / "table" / "evaluation.csv"
    assert table.read_text().splitlines()[-1].startswith(str(STEPS))


@pytest.mark.parametrize("why", ["an evaluation is left", "steps are left", "it runs", "finished"])
def test_nothing_is_written_of_a_run_that_is_not_done(tmp_path: Path, why: str) -> None:
    left = {"unfinished": {"hooks": [["evaluation", "after_step"]]}}
    run = killed(tmp_path, **(left if why.startswith("an") else {}))
    if why.startswith("steps"):
        run.checkpoints.joinpath(f"step-{STEPS:08}").rename(tmp_path / "away")
    if why == "finished":
        write_status(run, Status.begin(State.finished, 1))
    before = read_status(run)
    if why == "it runs":
        from threading import Thread

        with hold_lock(run):
            thread = Thread(target=lambda: record_completion(run))
            thread.start()
            thread.join()
    else:
        record_completion(run)
    assert read_status(run) == before and not read_events(run.events, "end")
