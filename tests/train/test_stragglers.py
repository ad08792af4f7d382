"""What slows a run down is named: a rank with what it loses its time in, a link, a disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import straggler_probe
from rank_processes import Case, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.plans.types import Batch
from trainctl.runs.event_descriptions import describe_straggler, still_slow
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import number, read_events
from trainctl.train.callbacks.stragglers import (
    WINDOW_STEPS,
    WINDOWS,
    Stragglers,
    slow_disks,
    slow_ranks,
)

PARTS = {"stall": "forward", "sleep": "backward", "stopped": "optimizer", "link": "communication"}
"""Part that a delay of another name is in."""
FACTOR = 3.5
"""Factor from which on something is slow: what else runs on this machine makes steps uneven."""


def expected(stage: int) -> list[tuple[int | None, str]]:
    """Return who is named for what, in turn."""
    found: list[tuple[int | None, str]] = []
    for what, who in (case.split("-") for case in straggler_probe.CASES[stage]):
        if who != "all":
            found.append((None if what == "link" else int(who), PARTS.get(what, what)))
    return found


@pytest.mark.slow
def test_real_ranks(tmp_path: Path) -> None:
    """Of two ranks the fast one waits for as long as the slow one works: that is no work of its
    own. A slow loader, optimizer, link and disk are told apart.
    """
    cases, run = [], RunPaths(tmp_path / "run")
    ends = {1: straggler_probe.steps_of(1)}
    ends[3] = ends[1] + straggler_probe.steps_of(3)
    for attempt, (stage, end) in enumerate(ends.items(), 1):
        config = tiny_config(
            steps=ends[3],
            evaluation_samples=0,
            sequence_length=32,
            zero_stage__stage=stage,
            model__num_layers=3,
        )
        config.checkpoint.every_steps = straggler_probe.SAVES_EVERY
        config.checkpoint.at_end = False
        config.launcher.straggler_factor = FACTOR
        plan = with_stop(tiny_plan(config, 2), end)
        cases.append(Case(plan, run, attempt))
    train_cases(2, cases, probe="straggler_probe:train")
    for attempt, stage in enumerate(ends, 1):
        records = [
            event
            for event in read_events(run.events)
            if (event["event"], event["attempt"]) == ("straggler", attempt)
        ]
        slow = [event for event in records if event["slow"]]
        named = [(event["rank"], event["part"]) for event in slow]
        disk = (1, "checkpoint")
        assert [each for each in named if each != disk] == expected(stage)
        assert named.count(disk) == 1
        assert [event["part"] for event in still_slow(records, attempt)] == ["checkpoint"]
        assert all(number(event["factor"]) > FACTOR for event in slow)
        assert all(event["seconds"] - event["usual_seconds"] > 0.1 for event in slow)


# ------------------------------------------------------------------------------- the comparison

FAST, SLOW = (0.0, 0.4, 0.8, 0.0), (0.0, 0.4, 1.6, 0.0)


def test_the_part_in_which_most_is_lost_is_named() -> None:
    own = [FAST, (0.1, 0.9, 0.9, 0.0), FAST, FAST]
    (found,) = slow_ranks(own, stages=1, factor=1.3, step_seconds=2.0)
    assert (found.rank, found.part, found.seconds, found.usual_seconds) == (1, "forward", 0.9, 0.4)
    assert found.factor == pytest.approx(1.9 / 1.2)


def test_stages_of_a_pipeline_are_compared_within_themselves() -> None:
    """A stage may have more work than another, so a rank is compared with its own stage's ranks."""
    assert slow_ranks([FAST, FAST, SLOW, SLOW], stages=2, factor=1.3, step_seconds=3.0) == []
    found = slow_ranks([FAST, SLOW, SLOW, SLOW], stages=2, factor=1.3, step_seconds=3.0)
    assert [slow.rank for slow in found] == [1]
    assert slow_ranks([FAST, SLOW], stages=2, factor=1.3, step_seconds=3.0) == []


def test_short_delays_are_not_reported_as_stragglers() -> None:
    own = [(0.001, 0.0, 0.0, 0.0), (0.004, 0.0, 0.0, 0.0)]
    assert slow_ranks(own, stages=1, factor=1.3, step_seconds=1.0) == []
    assert [slow.rank for slow in slow_ranks(own, stages=1, factor=1.3, step_seconds=0.01)] == [1]


def test_a_disk_is_judged_by_bytes_and_not_by_small_files() -> None:
    sizes = [4_000, 4_000, 2_000, 100]
    found, rate = slow_disks([2.0, 6.0, 1.0, 50.0], sizes, factor=1.3)
    assert rate == 0.0005
    assert [(slow.rank, slow.seconds, slow.usual_seconds) for slow in found] == [(1, 6.0, 2.0)]
    assert slow_disks([0.2, 0.9], [4_000, 4_000], factor=1.3)[0] == [], "less than a second"
    assert slow_disks([], [], factor=1.3)[0] == [] == slow_disks([0.0], [0], factor=1.3)[0]


# ---------------------------------------------------------------------------- in the course of it


def ranks(world_size: int = 2, **changes: Any) -> list[Stragglers]:
    config = tiny_config(steps=1000)
    for name, value in changes.items():
        setattr(config.launcher, name, value)
    plan = tiny_plan(config, world_size)
    plan = replace(plan, hardware=replace(plan.hardware, nodes=world_size, devices_per_node=1))
    hosts = [f"n{rank}" for rank in range(world_size)]
    return [
        Stragglers(
            plan,
            SimpleNamespace(
                rank=rank, world_size=world_size, gather=lambda _: [(n, (0.0, 0)) for n in hosts]
            ),  # type: ignore[arg-type]
        )
        for rank in range(world_size)
    ]


def steps(
    made: list[Stragglers], number: int, *own: Mapping[str, float], batch: Batch | None = None
) -> list[dict[str, Any]]:
    """Feed `number` one-second steps with each rank's times, and return the records."""
    records = []
    for _ in range(number):
        for each, seconds in zip(made, own, strict=True):
            # The quick rank waits for as long as the slow one works.
            each.add(1.0, {"data": 0.0, "backward": 0.5}, seconds, 0.5 - seconds["backward"], batch)
        windows = [each.window() for each in made]
        sums = [sum(values) for values in zip(*windows, strict=True)]
        for each in reversed(made):
            found = each.judge(sums, 7)
            assert not found or each is made[0]
        records += found
    return records


QUICK, LATE = {"backward": 0.2}, {"backward": 0.5}
BUSY, WAITING = {"backward": 0.45}, {"backward": 0.05}
"""Busy seconds of a backward pass of half a second, with short and with long collectives."""


def test_slow_collectives_are_nobody_s_and_measured_anew_with_another_batch() -> None:
    made = ranks()
    assert steps(made, 5 * WINDOW_STEPS, BUSY, BUSY) == []
    (named,) = steps(made, WINDOWS * WINDOW_STEPS, WAITING, WAITING)
    assert (named["rank"], named["part"], named["slow"]) == (None, "communication", True)
    assert named["seconds"] == pytest.approx(0.45) and named["usual_seconds"] == pytest.approx(0.05)
    assert describe_straggler(named) == (
        "the collectives of a step take 0.45 s instead of 0.05 s up to step 7, and no rank alone "
        "is slow: a link or the network is"
    )
    assert still_slow([{"event": "straggler", "attempt": 1, **named}], 1)
    (over,) = steps(made, WINDOWS * WINDOW_STEPS, BUSY, BUSY)
    assert describe_straggler(over) == "communication of all ranks is as fast as before by step 7"
    batch = tiny_plan(tiny_config(steps=8), 2).batch
    assert steps(made, 5 * WINDOW_STEPS, WAITING, WAITING, batch=batch) == []


def test_a_disk_is_named_after_two_checkpoints_read_or_written() -> None:
    (first, other) = ranks()
    fast, slow = (2.0, 4_000), (6.0, 4_000)
    assert first.judge_disk([fast, slow], 1, reading=True) == []
    (named,) = first.judge_disk([fast, slow], 5)
    assert (named["rank"], named["host"], named["part"]) == (1, "n1", "checkpoint")
    assert "rank 1 (node 1, n1) takes 3.00 times as long as its peers for its files" in (
        describe_straggler(named)
    )
    assert first.judge_disk([slow, slow], 6) == [], "all are slow for the first time"
    every, over = sorted(first.judge_disk([slow, slow], 7), key=lambda each: each["slow"])[::-1]
    assert (every["rank"], over["rank"], over["slow"]) == (None, 1, False)
    assert "all ranks take 6 s for their files of a checkpoint instead of 2 s" in (
        describe_straggler(every)
    )
    assert other.judge_disk([fast, slow], 5) == [] == first.judge_disk([], 8)


def test_named_once_and_once_more_when_it_has_caught_up() -> None:
    made = ranks()
    assert steps(made, WINDOWS * WINDOW_STEPS - 1, QUICK, LATE) == []
    (named,) = steps(made, 1, QUICK, LATE)
    assert (named["rank"], named["node"], named["host"], named["slow"]) == (1, 1, "n1", True)
    assert named["factor"] == pytest.approx(2.5) and named["part"] == "backward"
    assert "rank 1 (node 1, n1) takes 2.50 times as long as its peers" in describe_straggler(named)
    assert steps(made, 10 * WINDOW_STEPS, QUICK, LATE) == []
    assert steps(made, (WINDOWS - 1) * WINDOW_STEPS, QUICK, QUICK) == []
    (over,) = steps(made, WINDOW_STEPS, QUICK, QUICK)
    assert (over["rank"], over["slow"]) == (1, False)
    assert describe_straggler(over) == "rank 1 (node 1, n1) has caught up by step 7"
    records = [{"event": "straggler", "attempt": 2, **event} for event in (named, over)]
    assert still_slow(records[:1], 2) and not still_slow(records, 2)
    assert not still_slow(records[:1], 1)


def test_a_pause_is_nobody_s_fault() -> None:
    made = ranks()
    for _ in range(5):
        assert steps(made, 1, QUICK, {"backward": 30.0}) == []
        assert steps(made, 2 * WINDOW_STEPS - 1, QUICK, QUICK) == []


def test_switched_off_or_alone_nothing_is_exchanged() -> None:
    for made in (ranks(straggler_factor=None), ranks(1)):
        for _ in range(WINDOW_STEPS):
            for each in made:
                each.add(1.0, {}, {}, 0.0, None)
        assert all(each.window() == [] for each in made)
