"""A rank that the others wait for is named, with what it loses its time in; nobody else is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import DataType
from trainctl.runs.event_descriptions import describe_straggler, still_slow
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.callbacks.stragglers import WINDOW_STEPS, WINDOWS, Stragglers, slow_ranks

CASES = {
    # What is slow and on which rank, ZeRO stage: who is named, and for what.
    ("data-1", 1): (1, "data"),
    ("stall-1", 1): (1, "forward"),
    ("forward-1", 3): (1, "forward"),
    ("forward-0", 3): (0, "forward"),
    ("backward-1", 1): (1, "backward"),
    ("backward-1-partitioned", 3): (1, "backward"),
    ("sleep-1", 1): (1, "backward"),
    ("sleep-1-partitioned", 3): (1, "backward"),
    ("stall-1-partitioned", 3): (1, "forward"),
    ("stopped-1", 2): (1, "optimizer"),
    ("forward-all", 3): None,
    ("backward-all", 1): None,
}


@pytest.mark.slow
def test_real_ranks(tmp_path: Path) -> None:
    """The fast rank waits for as long as the slow rank works; its wait must not count as work."""
    cases = []
    for name, stage in CASES:
        config = tiny_config(steps=8, evaluation_samples=0)
        config.precision.compute = DataType.fp32
        config.zero_stage.stage = stage
        config.checkpoint.at_end = False
        config.launcher.straggler_factor = 2.5
        cases.append(Case(tiny_plan(config, 2), RunPaths(tmp_path / name)))
    train_cases(2, cases, probe="straggler_probe:train")
    found = {}
    for case in cases:
        records = [e for e in read_events(case.run.events) if e["event"] == "straggler"]
        found[case.run.root.name] = [(e["rank"], e["part"]) for e in records]
        assert still_slow(records, 1) == records
        for event in records:
            assert event["slow"] and event["factor"] > 2.5
            assert event["seconds"] - event["usual_seconds"] > 0.1
    assert found == {name: [named] if named else [] for (name, _), named in CASES.items()}


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
            SimpleNamespace(rank=rank, world_size=world_size, gather=lambda _: hosts),  # type: ignore[arg-type]
        )
        for rank in range(world_size)
    ]


def steps(made: list[Stragglers], number: int, *own: Mapping[str, float]) -> list[dict[str, Any]]:
    """Feed `number` one-second steps with each rank's times, and return the records."""
    records = []
    for _ in range(number):
        for each, seconds in zip(made, own, strict=True):
            # The wait of the quick rank is in the length of its part, not in what it was busy for.
            each.add(1.0, {"data": 0.0, "backward": 0.5}, seconds)
        windows = [each.window() for each in made]
        sums = [sum(values) for values in zip(*windows, strict=True)]
        for each in reversed(made):
            found = each.judge(sums, 7)
            assert not found or each is made[0]
        records += found
    return records


QUICK, LATE = {"backward": 0.2}, {"backward": 0.5}


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
                each.add(1.0, {}, {})
        assert all(each.window() == [] for each in made)
