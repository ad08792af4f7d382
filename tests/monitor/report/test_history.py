"""A run's records as columns: the run as it stands, whatever was done again, however it is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from made_runs import append, append_lines, drawn, new_run, other, step

from trainctl.monitor.report.history import History
from trainctl.monitor.report.marks import mark_of
from trainctl.monitor.report.panels import time_and_cost_of
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event, EventWriter, number, read_events, record_files, step_curve


@pytest.mark.parametrize("seed", range(4))
def test_the_run_as_it_stands(tmp_path: Path, seed: int) -> None:
    """Read in pieces of any size, it is what the reader of all records has."""
    run = new_run(tmp_path / "run")
    append(run, drawn(seed, 300))
    piecewise, whole = History(run), History(run)
    while piecewise.read(most_bytes=1000 + 700 * seed):
        pass
    assert whole.read() and not whole.read()
    wanted = step_curve(read_events(run.events))
    for history in (piecewise, whole):
        assert list(history.steps["step"]) == list(wanted)
        losses = [number(event["loss"]) for event in wanted.values()]
        np.testing.assert_array_equal(history.steps["loss"], losses)
        again = sum(len(branch.steps) for branch in history.branches)
        assert again + len(wanted) == len(read_events(run.events, "step"))
        assert history.evaluations["step"].tolist() == sorted(set(history.evaluations["step"]))
        assert history.evaluations.last("step") <= history.last_step


@pytest.mark.parametrize("append", [append, append_lines])
def test_what_is_appended_is_taken_in(
    tmp_path: Path, append: Callable[[RunPaths, Iterator[Event]], None]
) -> None:
    run = new_run(tmp_path / "run")
    history = History(run)
    history.read()
    version = history.version
    assert not history.read() and history.version == version
    append(run, iter([step(1), step(2)]))
    assert history.read() and history.last_step == 2 and history.version > version
    append(run, iter([step(2, attempt=2, loss=7.0), step(9, attempt=1)]))  # which is over
    assert history.read() and history.steps["loss"].tolist()[1:] == [7.0]
    with run.events.open("a") as stream:
        stream.write('{"schema": 1, "attempt": 2, "event": "st')  # a writer at work
    assert not history.read()
    for file in record_files(run.events):
        os.truncate(file, 0)
    append(run, iter([step(1)]))
    assert history.read() and history.last_step == 1 and not history.branches


def test_a_field_that_comes_late_or_goes(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    append(run, iter([step(1), step(2, mfu=0.4), step(3, loss_scale=8.0, peak_bytes=None)]))
    history = History(run)
    history.read()
    np.testing.assert_array_equal(history.steps["mfu"], [np.nan, 0.4, np.nan])
    np.testing.assert_array_equal(history.steps["peak/host"][:2], [5 << 20, 5 << 20])
    assert "peak/allocated" not in history.steps and len(history.steps["nothing"]) == 3


def test_an_evaluation_that_is_made_again_takes_the_place_of_the_last(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run")
    losses = ((2, 1, 5.0), (4, 1, 4.0), (2, 2, 3.0), (3, 2, 2.0), (3, 2, 1.0))
    evaluations = [other("evaluation", step=at, attempt=by, loss=loss) for at, by, loss in losses]
    append(run, iter([*map(step, range(1, 5)), *evaluations, step(4, attempt=2)]))
    history = History(run)
    history.read()
    assert history.evaluations["step"].tolist() == [2, 3]
    assert history.evaluations["loss"].tolist() == [3.0, 1.0]


def test_where_the_time_went(tmp_path: Path) -> None:
    """Two attempts of four steps, of which the second does two again; by a clock that is known."""
    run = new_run(tmp_path / "run")
    append(
        run,
        iter(
            [
                other("launch", time=0, host="a", pid=1, ranks=2),
                *(step(at, time=10 + at / 2) for at in (1, 2, 3, 4)),
                other("launch", attempt=2, time=20, host="a", pid=1, ranks=2),
                *(step(at, attempt=2, time=30 + (at - 2) / 2) for at in (3, 4, 5, 6)),
            ]
        ),
    )
    history = History(run)
    history.read()
    found = time_and_cost_of(history, stop_step=10, now=None, price=3.0)
    assert found["wall_seconds"] == 32 and found["between_attempts_seconds"] == 8
    assert found["kept_seconds"] == 3.0 and found["repeated_seconds"] == 1.0
    assert found["starting_seconds"] == 20 and found["other_seconds"] == 0
    assert found["repeated_steps"] == 2 and found["attempts"] == 2
    assert found["device_hours"] == pytest.approx(2 * (12 + 12) / 3600)
    assert (found["steps_to_come"], found["seconds_to_come"]) == (4, 2.0)
    assert found["tokens"] == 6 * 4096 and found["tokens_to_come"] == 4 * 4096
    assert found["price"]["so_far"] == pytest.approx(3.0 * found["device_hours"])
    assert found["price"]["repeated"] == pytest.approx(3.0 * 2 * 1.0 / 3600), "whatever lay between"
    assert found["parts"] == pytest.approx({"forward": 1.2, "backward": 1.5, "other": 0.3})


def test_numbers_of_callbacks_match_the_last_attempt(tmp_path: Path) -> None:
    def measured(number: int, value: float, attempt: int = 1) -> Event:
        values = {"norm": [value, 2 * value], "note": "text"}
        fields = {"step": number, "callback": "own", "name": "layers", "values": values}
        return other("callback", attempt=attempt, **fields)

    run = new_run(tmp_path / "run")
    append(run, iter([step(1), measured(1, 1.0), step(2), measured(2, 2.0), step(3)]))
    append(run, iter([step(2, attempt=2), measured(2, 5.0, attempt=2)]))
    history = History(run)
    history.read()
    (found,) = history.callbacks.values()
    assert found.names[1:] == ["own/layers/norm/0", "own/layers/norm/1"]
    assert found["step"].tolist() == [1, 2]
    assert found["own/layers/norm/1"].tolist() == [2.0, 10.0]


def test_held_out_losses_stand_in_the_rows_of_their_steps(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    with EventWriter(run.events, 1) as events:
        for step in (1, 2, 3):
            events.write("step", step=step, loss=3.0)
        events.write("evaluation", step=2, loss=2.5, sources={"code": 2.0})
    history = History(run)
    history.read()
    table = history.held_out()
    assert table["held_out/loss"][1] == 2.5 and table["held_out/loss/code"][1] == 2.0
    assert np.isnan(table["held_out/loss"]).tolist() == [True, False, True]


def test_failed_rewards_are_events() -> None:
    event = {"event": "reward_failed", "attempt": 1, "time": 0.0, "step": 4, "reward": "polite"}
    mark = mark_of(event | {"reason": "ValueError: no", "count": 3, "answers": 8}, 3)
    assert mark is not None and (mark.step, mark.cause) == (4, "ValueError: no")
    assert mark.text == "the reward polite failed for 3 of 8 answers"
