"""The rates that the optimizer really had are those of the schedule, also where a run goes on."""

from dataclasses import replace
from itertools import pairwise

import pytest
from poison import Poisoned, train_poisoned
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.cli.record_lines import event_lines
from trainctl.config.registry import list_kinds
from trainctl.config.schema import LrScaling, OnBadLoss
from trainctl.options.schedule.wsd import DecayShape
from trainctl.plans.schedule import Curve
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import verify
from trainctl.runs.records import read_events, step_curve

STEPS = 6


def scheduled(kind, steps=STEPS, stage=2):
    asked = {"floor_ratio": 0.1, "power": 2.0, "step_every": 2, "milestones": [3, 5]}
    return tiny_config(
        steps=steps,
        evaluation_samples=0,
        global_batch_size=4,
        gradient_accumulation_steps=1,
        sequence_length=32,
        precision__compute="fp32",
        zero_stage__stage=stage,
        schedule__kind=kind,
        schedule__warmup_steps=2,
        checkpoint__at_end=False,
        **{f"schedule__{key}": value for key, value in asked.items()},
    )


def steps_of(run):
    return step_curve(read_events(run.events))


@pytest.mark.slow
def test_every_kind_trains_with_its_own_rates(tmp_path):
    kinds = [kind for kind in list_kinds("schedule") if kind != "plateau"]  # which is below
    plans = [tiny_plan(scheduled(kind, stage=3), 2) for kind in kinds]
    cases = [Case(plan, RunPaths(tmp_path / kind)) for plan, kind in zip(plans, kinds, strict=True)]
    (found, _) = train_cases(2, cases, probe="rates_probe:train_with_each")
    seen = set()
    for case, (calls, peaks) in zip(cases, found, strict=True):
        kind = case.plan.config.schedule.kind
        factor = Curve.of(case.plan).factor
        records = steps_of(case.run)
        assert len(records) == STEPS and len(peaks) > 1
        for step, record in records.items():
            expected = {name: peak * factor(step - 1) for name, peak in peaks.items()}
            assert record["learning_rates"] == expected, (kind, step)
            assert record["learning_rate"] == case.plan.config.optimizer.lr * factor(step - 1)
        # Some wrappers call it once for each part of the weights.
        distinct = [rates for rates, before in pairwise([*calls, {}]) if rates != before]
        wanted = [record["learning_rates"] for record in records.values()]
        assert distinct == [r for r, before in pairwise([*wanted, {}]) if r != before], kind
        seen.add(tuple(record["learning_rate"] for record in records.values()))
    assert len(seen) == len(kinds)


def falling(stage):
    """Nothing is learnt, so `plateau` drops after evaluations 3, 5, 7; the fifth batch is bad."""
    config = scheduled("plateau", steps=8, stage=stage)
    config.optimizer.lr = 1e-30
    config.optimizer.lr_scaling = LrScaling.sqrt
    config.optimizer.lr_scaling_batch_size = 1  # of 4: twice the rate
    config.schedule.warmup_steps, config.schedule.floor_ratio = 0, None
    config.schedule.step_factor, config.schedule.plateau_patience = 0.5, 2
    config.training = replace(config.training, evaluation_samples=4, evaluate_every_steps=1)
    config.stability.on_bad_loss = OnBadLoss.rewind
    config.stability.loss_limit = 20.0
    config.stability.rewind_lr_factor = 0.25
    config.checkpoint.every_steps = 2
    return tiny_plan(config, 2)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "stops"), [(0, ()), (3, (5, 7))])
def test_the_rate_falls_at_a_plateau_and_after_a_rewind(tmp_path, stage, stops):
    """Also where the run is cut off right after the rewind, and after the next checkpoint."""
    plan, run = falling(stage), RunPaths(tmp_path / "run")
    for attempt, stop in enumerate((*stops, 8), 1):
        poison = tuple((4 * 4 + sample, 10.0) for sample in range(4))
        case = Poisoned(with_stop(plan, stop), run, attempt=attempt, poison=poison)
        assert {outcome.error for outcome in train_poisoned(case)} == {""}
    drops, cuts = [0, 0, 0, 1, 1, 2, 2, 3], [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.25]
    expected = [2e-30 * 0.5**drop * cut for drop, cut in zip(drops, cuts, strict=True)]
    records = steps_of(run)
    assert [record["learning_rate"] for record in records.values()] == pytest.approx(expected)
    for record in records.values():
        assert set(record["learning_rates"].values()) == {record["learning_rate"]}
    events = [event for event in read_events(run.events) if event["attempt"] <= len(stops) + 1]
    bad = [event for event in events if event["event"] == "intervention"]
    assert {(event["kind"], event["to_step"], event["lr_factor"]) for event in bad} == {
        ("loss_limit", 4, 0.25)
    }
    fallen = {event["step"]: event for event in events if event["event"] == "plateau"}
    assert {step: event["drops"] for step, event in fallen.items()} == {3: 1, 5: 2, 7: 3}
    assert "the learning rate drops to 0.5 of its peak" in event_lines(fallen[3])[0]
    assert "learning rate x 0.25 from there" in event_lines(bad[0])[0]


WHOLE, LONGER = 7, 10
STABLE = 4
"""A decay of 3 after it, and in the longer run three steps later."""


def wsd(steps):
    config = scheduled("wsd", steps=steps)
    config.schedule.decay_steps = 3
    config.schedule.decay_shape = DecayShape.linear
    config.checkpoint.at_end = True
    config.checkpoint.keep = 1
    return tiny_plan(config, 2)


def test_a_finished_run_is_extended_from_its_stable_phase(tmp_path):
    """Stopped, gone on with, decayed; extended from before the decay: as if planned so long."""
    short, longer = wsd(WHOLE), wsd(LONGER)
    run, other = RunPaths(tmp_path / "run"), RunPaths(tmp_path / "other")
    train_cases(2, [Case(with_stop(short, 3), run)])
    train_cases(2, [Case(short, run, attempt=2)])
    for step, record in steps_of(run).items():
        assert record["learning_rate"] == short.config.optimizer.lr * Curve.of(short).factor(
            step - 1
        )
    kept = {info.step: info for info in checkpoints.list_checkpoints(run)}
    assert list(kept) == [STABLE, WHOLE]  # keep=1 has not removed the first
    assert kept[STABLE].kept_for == "stable_phase" and kept[STABLE].attempt == 2
    (left,) = checkpoints.archive_later_checkpoints(run, STABLE, attempt=3)
    train_cases(2, [Case(longer, run, attempt=3), Case(longer, other)], together=True)
    assert curve(run) == curve(other)
    rates = {step: record["learning_rates"] for step, record in steps_of(run).items()}
    assert rates == {step: record["learning_rates"] for step, record in steps_of(other).items()}
    peak = longer.config.optimizer.lr
    assert all(set(rates[step].values()) == {peak} for step in range(2, LONGER - 2))
    assert set(rates[LONGER].values()) == {0.1 * peak}
    assert verify(left) == []  # the decayed model is still there
    steps = [info.step for info in checkpoints.list_checkpoints(run)]
    assert steps == [STABLE, LONGER - 3, LONGER]


def test_a_run_ends_when_the_held_out_loss_stays_and_remembers_over_a_resume(tmp_path):
    """The learning rate is too small to move a weight, so no evaluation is an improvement."""
    config = scheduled("constant", steps=12)
    config.training = replace(
        config.training, evaluation_samples=4, evaluate_every_steps=2, stop_patience=3
    )
    config.optimizer.lr = 1e-30
    config.checkpoint.at_end = True
    plan = tiny_plan(config, 2)
    run = RunPaths(tmp_path / "run")
    train_cases(2, [Case(with_stop(plan, 4), run)])
    train_cases(2, [Case(plan, run, attempt=2)])
    events = read_events(run.events)
    ends = [(event["step"], event["reason"]) for event in events if event["event"] == "end"]
    assert ends == [(4, "stop_after_steps"), (8, "no_improvement")]
    assert "in 3 evaluations the held-out loss was never below" in event_lines(events[-1])[0]
    newest, _ = checkpoints.newest_checkpoint(run)
    assert newest is not None and newest.step == 8
    losses = [event["loss"] for event in events if event["event"] == "evaluation"]
    assert newest.patience == {"best": losses[0], "best_step": 2, "evaluations_since": 3}
