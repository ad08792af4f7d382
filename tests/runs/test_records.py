from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.runs import records
from trainctl.runs.records import (
    EventFollower,
    EventWriter,
    number,
    read_events,
    step_curve,
    steps_from_end,
)


@pytest.mark.parametrize("kind", ["step", "evaluation"])
def test_records_carry_the_contract_and_every_digit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 3) as writer:
        written = writer.write(kind, step=1, loss=1 / 3, samples=[0, 8])
    (event,) = read_events(path)
    assert event == written
    assert (event["schema"], event["attempt"], event["event"]) == (1, 3, kind)
    file = tmp_path / "steps" / "attempt-3.csv" if kind == "step" else path
    assert event["loss"] == 1 / 3 and "0.3333333333333333" in file.read_text()


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_any_float_is_written_as_json_and_read_back(tmp_path_factory, value: float) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path_factory.mktemp("records") / "events.jsonl"
    with EventWriter(path, 1) as writer:
        writer.write("evaluation", step=1, loss=value, nested={"list": [value]})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    event = json.loads(path.read_text(), parse_constant=refuse)
    for read in (number(event["loss"]), number(event["nested"]["list"][0])):
        assert read == value or (math.isnan(read) and math.isnan(value))


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        writer.write("evaluation", step=1)
    whole = path.read_bytes()
    for cut in range(1, len(whole)):  # a writer killed after any number of bytes of its second line
        path.write_bytes(whole + whole[:cut])
        follower = EventFollower(path, 2)
        with EventWriter(path, 2) as writer:
            writer.write("evaluation", step=2)
            writer.write("evaluation", step=3)
        steps = [event["step"] for event in read_events(path)]
        # A line that lacks only its newline is whole.
        assert steps == ([1, 1, 2, 3] if cut == len(whole) - 1 else [1, 2, 3])
        assert [event["step"] for event in follower.poll()] == [2, 3]


def test_a_line_that_another_writer_left_torn_costs_only_itself(tmp_path: Path) -> None:
    """Another writer leaves such a line if the disk is full at its write."""
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        writer.write("step", step=1)
        with path.open("ab") as other:
            other.write(b'{"event": "failu')
        writer.write("failure", message="m")
    assert [event["event"] for event in read_events(path)] == ["step", "failure"]


def test_a_follower_sees_whole_lines_of_its_attempt_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = EventFollower(path, 2)
    assert follower.poll() == []
    with EventWriter(path, 1) as old, EventWriter(path, 2) as new:
        old.write("step", step=1)
        new.write("step", step=2)
        assert [event["step"] for event in follower.poll()] == [2]
        assert follower.poll() == []
        line = b'{"schema": 1, "attempt": 2, "event": "step", "step": 3}\n'
        for byte in line:
            with path.open("ab") as stream:
                stream.write(bytes([byte]))
            seen = follower.poll()
        assert [event["step"] for event in seen] == [3]


def _append(path: Path, attempt: int, count: int) -> None:
    with EventWriter(path, attempt) as writer:
        for index in range(count):
            writer.write("sample", index=index, text=str(attempt) * 3000)


def test_lines_of_several_processes_never_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append, args=(path, number, 200)) for number in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    events = read_events(path)
    assert len(events) == 800
    for attempt in range(1, 5):
        mine = [event for event in events if event["attempt"] == attempt]
        assert [event["index"] for event in mine] == list(range(200))
        assert {event["text"] for event in mine} == {str(attempt) * 3000}


def test_the_last_attempt_wins_from_its_first_step_on() -> None:
    def steps(attempt: int, first: int, last: int) -> list[dict[str, object]]:
        return [
            {"event": "step", "attempt": attempt, "step": step} for step in range(first, last + 1)
        ]

    events = [*steps(1, 1, 30), {"event": "end", "attempt": 1}, *steps(2, 21, 25)]
    curve = step_curve(events)
    assert list(curve) == list(range(1, 26)), "26 to 30 belong to a history that was given up"
    assert [event["attempt"] for event in curve.values()] == [1] * 20 + [2] * 5
    assert step_curve(reversed(events[-5:])) == step_curve([events[-5]])
    assert step_curve([]) == {}


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), max_size=6),
    st.sets(st.integers(1, 14), max_size=3),
    st.integers(1, 300),
)
def test_steps_read_from_the_end_match_the_curve(
    tmp_path_factory: pytest.TempPathFactory,
    attempts: list[tuple[int, int]],
    wanted: set[int],
    block: int,
) -> None:
    """Whatever each attempt went back to, and however the file is cut into blocks."""
    path = tmp_path_factory.mktemp("records") / "events.jsonl"
    for attempt, (first, count) in enumerate(attempts, 1):
        with EventWriter(path, attempt) as writer, path.open("ab") as torn:
            for step in range(first, first + count):
                writer.write("step", step=step, loss=step / attempt)
            writer.write("end", of="step")
            torn.write(b'{"event": "step", "attempt": 9, "st')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_BLOCK_BYTES", block)
        found = steps_from_end(path, wanted)
    curve = step_curve(read_events(path))
    assert found == {step: curve[step] for step in sorted(wanted) if step in curve}


def test_a_follower_outlives_a_file_that_cannot_be_read_for_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1):
        follower = EventFollower(path)
    path.rename(tmp_path / "away")
    path.symlink_to(path.name)  # ELOOP stands in for the ESTALE of a network file system
    assert follower.poll() == []
    path.unlink()
    (tmp_path / "away").rename(path)
    with EventWriter(path, 1) as writer:
        written = writer.write("step", step=1)
    assert follower.poll() == [written]


def test_records_of_some_kinds_are_read_without_parsing_the_others(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        for step in (1, 2):
            writer.write("step", step=step)
            # The word may stand elsewhere in a line, too.
            writer.write("evaluation", loss=1.0, of="step")
        writer.write("end", reason="complete")
    assert [event["event"] for event in read_events(path, "evaluation", "end")] == [
        "evaluation",
        "evaluation",
        "end",
    ]
    assert [event["step"] for event in read_events(path, "step")] == [1, 2]
    assert read_events(tmp_path / "none" / "events.jsonl", "step") == []


def test_a_line_waits_for_the_writer_of_another_machine_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS lets two machines append at the same place, unless the file is locked."""
    path = tmp_path / "events.jsonl"
    monkeypatch.setattr(records, "_LOCK_SECONDS", 60.0)
    lock = path.with_name("events.lock")
    with EventWriter(path, 1) as writer, lock.open() as other, path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)  # holds up nobody
        writer.write("start")
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=writer.write, args=("end",))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and len(read_events(path)) == 1
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join()
        fcntl.flock(other, fcntl.LOCK_EX)  # and is stopped for good
        monkeypatch.setattr(records, "_LOCK_SECONDS", 0.1)
        writer.write("end")
    assert len(read_events(path)) == 3
