"""Trackers that cannot take a step back, with their process killed anywhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from records_of_runs import append, draw, losses, new_run

from trainctl.config.schema import RunConfig
from trainctl.monitor.loggers.points import CurveReader, curve
from trainctl.options.logger import FollowedRun, Point
from trainctl.options.logger._tracker import Tracker
from trainctl.options.logger.mlflow import mlflow_name
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, iter_events

Key = tuple[str, int]


class Kept:
    """A tracker's memory, which outlives the processes that send to it: as W&B, it drops what is
    not above its last step, and loses what was on its way when one is killed."""

    def __init__(self) -> None:
        self.branches: dict[int, dict[Key, float]] = {}
        self.given_up: list[int] = []

    @property
    def standing(self) -> dict[Key, float]:
        (branch,) = set(self.branches) - set(self.given_up)
        return self.branches[branch]


class Client:
    def __init__(self, kept: Kept) -> None:
        self._kept, self._under_way = kept, dict[Key, float]()
        self._branch = 0

    def begin(self, branch: int) -> int:
        return self.open(branch)

    def open(self, branch: int) -> int:
        if self._under_way:
            self.arrive()
        self._branch = branch
        has = self._kept.branches.setdefault(branch, {})
        self._last = max((step for _, step in has), default=-1)
        return self._last

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.step > self._last:
                key = (point.kind, point.step)
                assert key not in self._under_way, "twice"
                self._under_way[key] = point.values[f"{point.kind}/loss"]

    def give_up(self, branch: int) -> None:
        if branch not in self._kept.given_up:
            self._kept.given_up.append(branch)

    def flush(self) -> None:
        """Nothing is certain to be there; it comes when the next run is opened, or at the end."""

    def arrive(self) -> None:
        self._kept.branches[self._branch].update(self._under_way)
        self._under_way = {}

    def end(self, state: str) -> None:
        self.arrive()

    def close(self) -> None:
        self.arrive()


def followed(run: RunPaths) -> FollowedRun:
    return FollowedRun(
        folder=run.root,
        id="a",
        name="run",
        keys=None,
        config=RunConfig(),
        curve=partial(curve, run.events),
    )


def feed(run: RunPaths, kept: Kept, chance: random.Random) -> int:
    """Send all records in batches; now and then the process is killed before its commit, or after
    it with what was under way lost. How often."""
    events = list(iter_events(run.events))
    at, state, kills = 0, None, 0
    reader = CurveReader()
    sink, client = None, None
    while at < len(events):
        if sink is None:
            client = Client(kept)
            sink = Tracker(followed(run), state, client)
        end = min(len(events), at + chance.randrange(1, 40))
        before = (reader.attempt, reader.step, reader.points)
        waiting: list[Point] = []
        for point, goes_back in reader.points_of(events[at:end]):
            if goes_back:
                sink.write(waiting)
                waiting = []
                sink.go_back(point.step)
            waiting.append(point)
        sink.write(waiting)
        fate = chance.random()
        if fate > 0.1:
            at, state = end, dict(sink.commit())
        else:
            reader = CurveReader(*before)
        if fate < 0.25:
            kills += 1
            sink = None
        elif fate < 0.4:
            client.arrive()
    sink = sink or Tracker(followed(run), state, Client(kept))
    sink.end("finished")
    return kills


@pytest.mark.parametrize("seed", range(3))
def test_what_stands_is_the_run_s_curve(tmp_path: Path, seed: int) -> None:
    run, kept = new_run(tmp_path), Kept()
    append(run, draw(seed, 200))
    assert feed(run, kept, random.Random(seed)) > 0
    train, evaluations = losses(run)
    expected = {("train", step): loss for step, loss in train.items()}
    expected |= {("evaluation", step): loss for step, loss in evaluations.items()}
    # A process that was killed may take an evaluation with it whose step has come.
    lost = set(expected) - set(kept.standing)
    assert {kind for kind, _ in lost} <= {"evaluation"}
    kept_of = {key: expected[key] for key in expected if key not in lost}
    assert repr(sorted(kept.standing.items())) == repr(sorted(kept_of.items()))
    assert len(kept.branches) > 1, "this run goes back"


def test_steps_that_come_out_as_before_begin_nothing_new(tmp_path: Path) -> None:
    run, kept = new_run(tmp_path), Kept()
    with EventWriter(run.events, 1) as events:
        for step in range(1, 21):
            events.write("step", step=step, loss=1 / step, seconds={"total": 1.0})
    with EventWriter(run.events, 2) as events:
        for step in range(11, 31):
            events.write("step", step=step, loss=1 / step, seconds={"total": 2.0})
    feed(run, kept, random.Random(3))
    assert set(kept.branches) == {0} and not kept.given_up
    assert kept.standing == {("train", step): 1 / step for step in range(1, 31)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("train/loss", "train/loss"),
        ("config.optimizer.lr", "config.optimizer.lr"),
        ("train/acc@1 (%)", "train/acc_1 ___"),
        ("train//f1/", "train/f1"),
        ("../x", "x"),
    ],
)
def test_mlflow_takes_every_name(name: str, expected: str) -> None:
    assert mlflow_name(name) == expected


def test_steps_may_count_from_0(tmp_path: Path) -> None:
    """User programs may count so. Their first step must not look like a step back."""
    run, kept = new_run(tmp_path), Kept()
    for attempt, steps in ((1, range(0, 9)), (2, range(5, 12))):
        with EventWriter(run.events, attempt) as events:
            for step in steps:
                events.write("step", step=step, loss=1 / (step + 1))
    feed(run, kept, random.Random(3))
    assert set(kept.branches) == {0}
    assert kept.standing == {("train", step): 1 / (step + 1) for step in range(12)}


def test_curve_is_the_run_as_it_stood_at_each_point(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    append(run, draw(5, 120))
    stood: list[dict[Key, Any]] = [{}]
    for point, goes_back in CurveReader().points_of(iter_events(run.events)):
        now = dict(stood[-1])
        if goes_back:
            now = {key: number for key, number in now.items() if key[1] < point.step}
        now[(point.kind, point.step)] = point.number
        stood.append(now)
    for number in (0, 1, 40, 90, len(stood) - 1):
        found = list(curve(run.events, number))
        assert {(p.kind, p.step): p.number for p in found} == stood[number]
        assert [p.number for p in found] == sorted(p.number for p in found)
