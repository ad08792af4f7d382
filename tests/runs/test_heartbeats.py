from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainctl.runs.status import Beat, Heartbeat, Phase, read_beat


def test_the_last_beat_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "heartbeats" / "rank-0"
    assert read_beat(path) is None
    before = time.monotonic()
    heartbeat = Heartbeat(path)
    first = read_beat(path)
    assert first == Beat(first.monotonic if first else 0.0, Phase.start, 0)
    heartbeat.beat(Phase.evaluate, 1_000_000)
    heartbeat.beat(Phase.step)
    last = read_beat(path)
    assert last is not None and before <= last.monotonic <= time.monotonic()
    assert (last.phase, last.step) == (Phase.step, 1_000_000)
    assert path.stat().st_size == 128


@pytest.mark.parametrize("text", ["", "{", "[]", '{"monotonic": 1, "phase": "nap", "step": 1}'])
def test_a_beat_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank-0"
    path.write_text(text)
    assert read_beat(path) is None


def test_a_beat_costs_less_than_a_tenth_of_a_millisecond(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "rank-0")
    costs = []
    for step in range(200):
        started = time.perf_counter()
        heartbeat.beat(Phase.step, step)
        costs.append(time.perf_counter() - started)
    assert sorted(costs)[100] < 1e-4
