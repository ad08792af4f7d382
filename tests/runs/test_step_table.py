"""Steps in tables: nothing of them is lost, wherever a reader begins and whatever is torn."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from packed import append_packed

from trainctl.config.reading import open_file
from trainctl.runs import packed_rows, step_table
from trainctl.runs.records import (
    EventFollower,
    EventWriter,
    RecordReader,
    events_from_end,
    read_events,
    round_measured,
    steps_from_end,
)
from trainctl.runs.step_table import step_files

LEAVES = (
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
RESERVED = ("step", "time", "event", "schema", "attempt", "events_size", "self")


def fields_of(step: int) -> dict[str, Any]:
    """Return a GPU trainer's step record, with unrounded digits where the trainer has them."""
    rate, speed = 6e-4 * (0.55 + 0.45 * math.cos(step * 3.1e-6)), 1.2158e6 + math.sin(step) * 1e4
    norms = [0.5 + 0.1 * math.sin(step), 0.3 + 0.1 * math.cos(step)]
    seconds = {"total": 0.431, "data": 0.00012, "forward": 0.12, "backward": 0.27}
    seconds = {name: round(mean + math.sin(step) / 1e4, 6) for name, mean in seconds.items()}
    return {
        "step": step,
        "loss": 2 + 8 / math.sqrt(step + 1),
        "learning_rate": rate,
        "learning_rates": {"decayed": rate, "undecayed": rate},
        "grad_norm": math.hypot(*norms),
        "grad_norms": {"decayed": round_measured(norms[0]), "undecayed": round_measured(norms[1])},
        "tokens": step * 524288,
        "tokens_per_second": round_measured(speed),
        "mfu": None,
        "seconds": {**seconds, "optimizer": 0.031234},
        "peak_bytes": {"allocated": None, "host": 4_113_103_360 + step},
        "samples": [(step - 1) * 256, step * 256],
    }


def write(path: Path, steps: range, attempt: int = 1) -> list[dict[str, Any]]:
    with EventWriter(path, attempt) as writer:
        return [writer.write("step", **fields_of(step)) for step in steps]


def table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file as any reader of CSV gets them."""
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def stale_once() -> Callable[[Path], Any]:
    """Return `open_file` as on a network file system whose first handle is stale."""
    outcomes = iter([OSError(116, "Stale file handle")])

    def open_or_fail(path: Path) -> Any:
        for error in outcomes:
            raise error
        return open_file(path)

    return open_or_fail


@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name not in RESERVED), VALUES))
@example({"learning_rates": [1.0, 2.0, 1.0], "a": 'x,y\n"z"\\n\r', "seconds": {"a.b": 1, "0": 2}})
@example({"a": {"": {"\\": [True, [], {}]}}, "0": 1, "a.b": 2, "1.": -0.0})
def test_whatever_is_recorded_is_read(
    tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("records") / "events.jsonl"
    with EventWriter(path, 1) as writer:
        written = writer.write("step", step=1, **fields)
    assert read_events(path) == [written]


def test_an_empty_cell_is_a_value_that_was_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        writer.write("step", step=1, mfu=None, z_loss=None, peak_bytes={"allocated": None}, a=[1])
        writer.write("step", step=2, a=[None, 2.5], skipped=True, loss=math.nan, limit=-math.inf)
    first, second = read_events(path)
    assert first["mfu"] is None and first["peak_bytes"] == {"allocated": None}
    assert "z_loss" not in first and first["a"] == [1]
    assert second["a"] == [None, 2.5] and second["skipped"] is True
    assert (second["loss"], second["limit"]) == ("NaN", "-Infinity")


def test_a_million_steps_take_less_than_350_mb(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = write(path, range(900_001, 900_401))
    file = tmp_path / "steps" / "attempt-1.csv"
    assert file.stat().st_size / 400 < 350 and path.stat().st_size == 0
    assert read_events(path) == before
    last = table(file)[-1]
    assert (last["step"], float(last["loss"])) == ("900400", before[-1]["loss"])
    assert float(last["seconds.forward"]) == before[-1]["seconds"]["forward"]


def test_a_reader_may_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write(path, range(1, 21))
    follower = EventFollower(path)
    written += write(path, range(11, 31), attempt=2)
    assert follower.poll() == written[20:]
    assert list(events_from_end(path)) == written[::-1]
    assert next(events_from_end(path, "step", most_bytes=2000)) == written[-1]
    assert steps_from_end(path, [10, 11]) == {10: written[9], 11: written[20]}
    behind = EventFollower(path, 2, from_start=True)
    assert behind.poll() == written[20:] and behind.poll() == []


@given(
    st.lists(st.sampled_from(["step", "late", "evaluation", "launch"]), max_size=40),
    st.integers(1, 2000),
    st.integers(1, 4),
)
def test_steps_are_read_among_the_events_where_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[str], most_bytes: int, old: int
) -> None:
    """At once, piece by piece, while they are written, and from the end; also a run whose first
    attempts are of an earlier version.
    """
    path = tmp_path_factory.mktemp("records") / "events.jsonl"
    attempt, step, written = 1, 0, list[dict[str, Any]]()
    follower, seen = RecordReader(path), list[dict[str, Any]]()
    path.touch()
    for kind in kinds:
        attempt += kind == "launch"
        step += kind in ("step", "late")
        with EventWriter(path, attempt) as writer:
            if kind not in ("step", "late"):
                written.append(writer.write(kind, step=step))
            elif attempt < old:
                event = {
                    "schema": 1,
                    "attempt": attempt,
                    "time": 1.0,
                    "event": "step",
                    "step": step,
                }
                written.append({**event, "seconds": {"total": 0.5}})
                append_packed(path, written[-1:])
            else:
                seconds = {"total": 0.5, **({"evaluation": 1.5} if kind == "late" else {})}
                written.append(writer.write("step", step=step, seconds=seconds))
        if step % 3 == 0:
            seen += follower.read(most_bytes)
    pieces, found = RecordReader(path), list[dict[str, Any]]()
    for reader, events in ((follower, seen), (pieces, found)):
        before = None
        while reader.position != before:
            before = reader.position
            events += reader.read(most_bytes)
    assert read_events(path) == found == seen == written
    assert list(events_from_end(path)) == written[::-1]
    for kind in ("step", "evaluation"):
        wanted = [event for event in written if event["event"] == kind]
        assert read_events(path, kind) == wanted
        assert list(events_from_end(path, kind)) == wanted[::-1]


def test_a_line_of_megabytes_is_passed_in_time_that_grows_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write(path, range(1, 21))
    for file in (path, tmp_path / "steps" / "attempt-1.csv"):
        with file.open("ab") as stream:
            stream.write(b"x" * 40_000_000 + b"\n")
    written += write(path, range(11, 31), attempt=2)
    began = time.process_time()
    assert list(events_from_end(path)) == written[::-1]
    assert time.process_time() - began < 3  # block by block put together anew: twenty


def test_a_writer_killed_at_any_byte_leaves_a_file_that_is_read(tmp_path: Path) -> None:
    path, file = tmp_path / "events.jsonl", tmp_path / "steps" / "attempt-1.csv"
    written = write(path, range(1, 4))
    whole = file.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        rows = max(0, sum(end <= cut for end in ends) - 1)
        assert read_events(path) == written[:rows]
        assert list(events_from_end(path)) == written[:rows][::-1]
        follower = EventFollower(path)
        # The same attempt goes on, or the next one; either leaves plain CSV behind.
        attempt = 1 + cut % 2
        with EventWriter(path, attempt) as writer:
            last = writer.write("step", **fields_of(9))
        assert read_events(path) == [*written[:rows], last]
        assert follower.poll() == [last]
        for step_file in step_files(tmp_path / "steps"):
            for row in table(step_file.path):
                assert row["attempt"] == str(step_file.attempt) and None not in row
            step_file.path.unlink()


def test_rows_that_are_none_cost_only_themselves(tmp_path: Path) -> None:
    path, file = tmp_path / "events.jsonl", tmp_path / "steps" / "attempt-1.csv"
    written = write(path, range(1, 4))
    header, *rows = file.read_bytes().splitlines(keepends=True)
    deep = b"[" * 100_000
    damaged = [b"\n", b"\xff\xfe\n", b"1,2\n", b'"\n', deep + b"\n", rows[0].replace(b",", b"")]
    damaged += [rows[0].replace(b"1,", b"x,", 1), rows[0].rstrip() + b"2\n", header]
    file.write_bytes(header + rows[0] + b"".join(damaged) + b"".join(rows[1:]))
    assert read_events(path) == written
    for start in (b"a,a.0,step,attempt\n", b"\n", b"\xff\n", b"x" * 100 + b"\n", b""):
        file.write_bytes(start + b"".join(rows))
        assert read_events(path) == []
    file.unlink()
    file.mkdir()
    assert step_files(file.parent / "none") == []


def test_a_further_column_begins_a_file_and_every_file_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        written = [writer.write("step", **fields_of(1))]
        seconds = {**fields_of(2)["seconds"], "evaluation": 3.0, "checkpoint": 0.5}
        written += [writer.write("step", **{**fields_of(2), "seconds": seconds})]
        assert len(step_files(tmp_path / "steps")) == 1, "columns that are known to follow"
        written += [writer.write("step", **fields_of(3), intervention='skip, "twice"')]
        written += [writer.write("step", **fields_of(4))]
    written += write(path, range(5, 6))
    assert read_events(path) == written
    first, second = (table(file.path) for file in step_files(tmp_path / "steps"))
    assert [row["step"] for row in first] == ["1", "2"]
    assert [row["step"] for row in second] == ["3", "4", "5"]
    assert list(second[0])[: len(first[0]) - 2] == list(first[0])[:-2]
    assert second[0]["intervention"] == 'skip, "twice"' and second[1]["intervention"] == ""


def test_steps_that_differ_again_and_again_are_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_table, "MOST_FILES", 3)
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        written = [
            writer.write("step", step=step, loss=1.0, seconds={f"part {step % 9}": 0.5})
            for step in range(1, 40)
        ]
    assert read_events(path) == written and len(step_files(tmp_path / "steps")) == 3
    assert b'"part 4"' in path.read_bytes()


def test_two_processes_of_an_attempt_may_record(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as one, EventWriter(path, 1) as other:
        written = [one.write("step", step=1, values={"a": 1})]
        written += [other.write("step", step=2, values={"b": 1})]
        written += [one.write("step", step=3, values={"c": 1})]
        written += [other.write("step", step=4, values={"a": 1, "c": 1})]
        written += [one.write("step", step=5, values={"a": 1, "b": 2, "c": 1})]
    assert read_events(path) == written


def test_a_file_system_that_fails_for_a_moment_costs_a_follower_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    write(path, range(0, 1))
    follower = EventFollower(path)
    written = write(path, range(1, 4), attempt=2)
    monkeypatch.setattr(step_table, "open_file", stale_once())
    assert follower.poll() == [] and follower.poll() == written


def test_packed_steps_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    head = {"schema": 1, "attempt": 1, "time": 1795402915.704915, "event": "step"}
    written = [{**head, **fields_of(step)} for step in range(1, 6)]
    path.write_text(json.dumps(written[0]) + "\n")  # with all names: earlier still
    append_packed(path, written[1:])
    assert read_events(path) == written
    written += write(path, range(4, 8), attempt=2)
    assert read_events(path) == written
    assert steps_from_end(path, [3, 4]) == {3: written[2], 4: written[5]}


def test_what_is_torn_or_moved_of_packed_steps_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    head = {"schema": 1, "attempt": 1, "time": 1.5, "event": "step"}
    written = [{**head, **fields_of(step)} for step in range(1, 6)]
    append_packed(path, written)
    whole = path.read_bytes()
    names = whole.index(b"\n") + 1
    path.write_bytes(whole[: names // 2] + b"\n" + whole[names:])
    assert read_events(path) == [], "without the names there is nothing to say"
    path.write_bytes(b'{"an": "edit"}\n' + whole)
    assert read_events(path) == written and next(events_from_end(path)) == written[-1]
    lines = whole.splitlines()
    for wrong in (b'{"at": -1', b'{"at": 1e99', b'{"at": [0]', b'{"row": 7', b'{"row": [1, 2]'):
        path.write_bytes(whole + lines[-1].replace(b"{", wrong + b",", 1) + b"\n")
        assert read_events(path)[:5] == written


@pytest.mark.parametrize(
    "names", [[[["grad_norms", -1]]], [[["grad_norms", 2**70]]], [[["a"]], [["a", 0, "b"]]]]
)
def test_names_that_no_packed_step_has_cost_only_their_rows(
    tmp_path: Path, names: list[Any]
) -> None:
    path = tmp_path / "events.jsonl"
    row = {"attempt": 1, "time": 1.0, "event": "step", "step": 1, "row": [1] * len(names)}
    columns = {"attempt": 1, "time": 1.0, "event": "columns", "at": 0, "names": names}
    lines = [columns, {**row, "at": 0}, {**row, "at": 2**62}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_events(path) == []
    written = write(path, range(1, 3))
    assert read_events(path) == written


def test_packed_steps_wait_for_a_file_system_that_fails_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    path.touch()
    follower = EventFollower(path)
    written = [{"schema": 1, "attempt": 1, "time": 1.5, "event": "step", **fields_of(1)}]
    append_packed(path, written)
    monkeypatch.setattr(packed_rows, "open_file", stale_once())
    assert follower.poll() == [] and follower.poll() == written
