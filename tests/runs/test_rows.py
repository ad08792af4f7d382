"""Steps as rows: nothing of them is lost, wherever a reader begins and whatever is torn."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainctl.config.reading import open_file
from trainctl.runs import records
from trainctl.runs.records import (
    EventFollower,
    EventWriter,
    events_after,
    events_from_end,
    read_events,
    short,
    steps_from_end,
)
from trainctl.runs.rows import PACKED, Layout, names_of, pack

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.just("NaN")
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


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
        "grad_norms": {"decayed": short(norms[0]), "undecayed": short(norms[1])},
        "tokens": step * 524288,
        "tokens_per_second": short(speed),
        "mfu": short(speed / 2.9e6),
        "seconds": {**seconds, "optimizer": 0.031234},
        "peak_bytes": {"allocated": 31_138_512_896, "host": 4_113_103_360 + step},
        "samples": [(step - 1) * 256, step * 256],
    }


def write(path: Path, steps: range, attempt: int = 1) -> list[dict[str, Any]]:
    with EventWriter(path, attempt) as writer:
        return [writer.write("step", **fields_of(step)) for step in steps]


@given(st.dictionaries(st.sampled_from(PACKED), VALUES))
@example({"learning_rates": [1.0, 2.0, 1.0]})
@example({"learning_rate": [0.0, [None, 0.0]]})
def test_whatever_is_packed_is_unpacked(fields: dict[str, Any]) -> None:
    names, row = pack(fields)
    assert (
        Layout(names_of(json.loads(json.dumps(names)))).fields(json.loads(json.dumps(row)))
        == fields
    )


def test_a_million_steps_take_less_than_300_mb(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    before = write(path, range(900_000, 900_001))
    size = path.stat().st_size
    before += write(path, range(900_001, 900_401), attempt=1)
    assert (path.stat().st_size - size - 700) / 400 < 300
    assert read_events(path) == before
    last = json.loads(path.read_text().splitlines()[-1])
    assert last["loss"] == before[-1]["loss"] and last["step"] == 900_400, "to be read by a person"


def test_a_reader_may_begin_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write(path, range(1, 21))
    follower, middle = EventFollower(path), path.stat().st_size
    written += write(path, range(11, 31), attempt=2)
    assert follower.poll() == written[20:] and events_after(path, middle)[0] == written[20:]
    assert list(events_from_end(path)) == written[::-1]
    assert next(events_from_end(path, "step", most_bytes=2000)) == written[-1]
    assert steps_from_end(path, [10, 11]) == {10: written[9], 11: written[20]}
    offset, found = 0, []
    while True:
        events, after = events_after(path, offset, 500)
        if after == offset:
            break
        offset, found = after, found + events
    assert found == written
    behind = EventFollower(path, 2, from_start=True)
    assert behind.poll() == written[20:] and behind.poll() == []


def test_a_line_of_megabytes_is_passed_in_time_that_grows_with_its_length(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write(path, range(1, 21))
    with path.open("ab") as stream:
        stream.write(b"x" * 40_000_000 + b"\n")
    written += write(path, range(11, 31), attempt=2)
    began = time.process_time()
    assert list(events_from_end(path)) == written[::-1]
    assert time.process_time() - began < 2  # block by block put together anew: twelve


def test_what_is_torn_or_moved_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written = write(path, range(1, 6))
    whole = path.read_bytes()
    names = whole.index(b"\n") + 1
    path.write_bytes(whole[: names // 2] + b"\n" + whole[names:])
    assert read_events(path) == [], "without the names there is nothing to say"
    path.write_bytes(b'{"an": "edit"}\n' + whole)
    assert read_events(path) == written and next(events_from_end(path)) == written[-1]
    for cut in range(names + 1, len(whole), 37):
        path.write_bytes(whole[:cut])
        with EventWriter(path, 2) as writer:
            last = writer.write("step", **fields_of(9))
        assert read_events(path)[-1] == last
        path.unlink()
    lines = whole.splitlines()
    for wrong in (b'{"at": -1', b'{"at": 1e99', b'{"at": [0]', b'{"row": 7', b'{"row": [1, 2]'):
        path.write_bytes(whole + lines[-1].replace(b"{", wrong + b",", 1) + b"\n")
        assert read_events(path)[:5] == written


@pytest.mark.parametrize(
    "names", [[[["grad_norms", -1]]], [[["grad_norms", 2**70]]], [[["a"]], [["a", 0, "b"]]]]
)
def test_names_that_no_record_has_cost_only_their_rows(tmp_path: Path, names: list[Any]) -> None:
    path = tmp_path / "events.jsonl"
    row = {"attempt": 1, "time": 1.0, "event": "step", "step": 1, "row": [1] * len(names)}
    columns = {"attempt": 1, "time": 1.0, "event": "columns", "at": 0, "names": names}
    lines = [columns, {**row, "at": 0}, {**row, "at": 2**62}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_events(path) == []
    written = write(path, range(1, 3))
    assert read_events(path) == written


def test_a_file_system_that_fails_for_a_moment_costs_a_follower_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events.jsonl"
    write(path, range(0, 1))
    follower = EventFollower(path)
    written = write(path, range(1, 4), attempt=2)
    opened = 0

    def fails_once(asked: Path) -> Any:
        nonlocal opened
        opened += 1
        if opened == 2:  # the first reads the lines, the second the names
            raise OSError(116, "Stale file handle")
        return open_file(asked)

    monkeypatch.setattr(records, "open_file", fails_once)
    assert follower.poll() == [] and follower.poll() == written


def test_steps_of_many_forms_keep_all_names_in_their_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_MOST_SHAPES", 3)
    path = tmp_path / "events.jsonl"
    with EventWriter(path, 1) as writer:
        written = [
            writer.write("step", step=step, loss=1.0, seconds={f"part {step % 9}": 0.5})
            for step in range(1, 40)
        ]
        written.append(writer.write("step", step=40, loss=math.inf, grad_norm=-math.inf))
    assert [*read_events(path)[:-1], written[-1]] == written
    assert read_events(path)[-1]["grad_norm"] == "-Infinity"
    assert path.read_text().count('"names"') == 3


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    old = {"schema": 1, "attempt": 1, "time": 1795402915.704915, "event": "step", **fields_of(1)}
    path.write_text(json.dumps(old) + "\n")
    assert read_events(path) == [old]
    assert read_events(path) + write(path, range(2, 4), attempt=2) == read_events(path)
