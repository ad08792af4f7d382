"""Tests that a run draws the samples that its data plan shows beforehand."""

from __future__ import annotations

import numpy as np
import pytest

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.schema import Accelerator, RunConfig
from trainctl.data.mixture import SourceLength, plan_data, sample_order
from trainctl.hardware import Hardware
from trainctl.plans.mixture import samples_in
from trainctl.rules.resolve import resolve

CPUS = Hardware(name="2xcpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=2)


def plan_of(sources, stages=(), steps=100, **training):
    plain = to_plain(RunConfig())
    plain["data"] |= {
        "sources": {name: {"kind": "stdlib", **keys} for name, keys in sources.items()},
        "stages": list(stages),
    }
    plain["training"] |= {
        "steps": steps,
        "sequence_length": 64,
        "global_batch_size": 16,
        "micro_batch_size": 4,
        **training,
    }
    resolution = resolve(from_plain(RunConfig, plain), CPUS)
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def counts(**tokens):
    return {name: SourceLength(tokens=count) for name, count in tokens.items()}


def test_what_is_planned_is_drawn():
    plan = plan_of(
        {"code": {"weight": 0.7}, "prose": {"weight": 0.3}, "late": {}},
        [{"until": 0.8}, {"weights": {"late": 1, "prose": 3}, "sequence_length": 16}],
    )
    tokens = {"code": 50_000, "prose": 9_000, "late": 3_000}
    found = plan_data(plan, counts(**tokens))
    order = sample_order(plan, tokens)
    drawn = order.at(np.arange(sum(stage.samples for stage in found.stages)))
    for number, stage in enumerate(found.stages):
        for name, use in stage.sources.items():
            mine = (drawn.stage == number) & (drawn.source == order.names.index(name))
            assert mine.sum() == use.samples
            assert use.tokens == use.samples * stage.sequence_length
            samples = samples_in(tokens[name], stage.sequence_length)
            assert use.epochs == pytest.approx(use.samples / samples)
        assert sum(use.share for use in stage.sources.values()) == pytest.approx(1)
    assert [stage.first_step for stage in found.stages] == [0, 80]
    assert set(found.stages[0].sources) == {"code", "prose"}
    assert found.run["late"].tokens == 20 * 16 * 64 // 4
    assert found.run["code"].unseen == 0 and found.run["code"].epochs > 1
    assert not found.problems


def test_two_epochs_of_a_small_source_are_two():
    plan = plan_of({"small": {"epochs": 2, "max_epochs": 2}, "large": {"weight": 1}})
    tokens = {"small": 10_001, "large": 10**7}
    found = plan_data(plan, counts(**tokens))
    samples = samples_in(10_001, 64)
    assert abs(found.run["small"].samples - 2 * samples) <= 1
    assert not found.problems
    drawn = sample_order(plan, tokens).at(np.arange(1600))
    seen = np.bincount(drawn.index[drawn.source == 1], minlength=samples)
    assert (seen >= 1).all() and abs(seen.sum() - 2 * samples) <= 1
    assert found.run["large"].unseen == 10**7 - found.run["large"].tokens


def test_a_source_that_runs_out_says_by_how_much_and_when():
    plan = plan_of({"a": {"weight": 0.5, "max_epochs": 1.5}, "b": {"weight": 0.5}})
    found = plan_data(plan, counts(a=20_000, b=10**6))
    (problem,) = found.problems
    assert (problem.rule, problem.key) == ("TC345", "data.sources.a.max_epochs")
    assert "falls short by 21,200 tokens" in problem.message
    step = int(problem.message.rpartition("step ")[2])
    order = sample_order(plan, {"a": 20_000, "b": 10**6})
    most = 1.5 * samples_in(20_000, 64)
    assert order.draws_before((step - 1) * 16)["a"] < most <= order.draws_before(step * 16)["a"]


def test_a_source_without_a_sample_is_a_problem_and_no_plan():
    plan = plan_of({"a": {"weight": 1}, "b": {"weight": 1}})
    found = plan_data(plan, counts(a=64, b=10_000))
    assert [problem.key for problem in found.problems] == ["data.sources.a"]
    assert "a has 64 tokens to train on: less than one sample of 64" in found.problems[0].message
    assert found.stages == ()


def test_amounts_beyond_the_run_are_labelled():
    plan = plan_of({"a": {"tokens": 1000}, "b": {"epochs": 1}, "c": {"weight": 1}}, steps=2)
    found = plan_data(plan, counts(a=10_000, b=10_000, c=10_000))
    messages = [problem.message for problem in found.problems if problem.is_error]
    assert messages == [
        "nothing is left for c: tokens and epochs of the other sources take all of the run's "
        "2,048 tokens"
    ]
    (more,) = [problem for problem in found.problems if problem.key == "data.sources.b.epochs"]
    assert "b is to give 9,984 tokens (epochs=1.0), and the run of 2,048 takes" in more.message


def test_a_longer_length_says_what_it_leaves_out():
    stages = [{"until": 0.5, "sequence_length": 32}, {}]
    found = plan_data(plan_of({"a": {"weight": 1}}, stages), counts(a=200_000))
    (problem,) = found.problems
    assert problem.rule == "TC347" and not problem.is_error
    left = samples_in(200_000, 32) * 32 - 50 * 16 * 64
    assert f"{left:,} tokens of a are left out" in problem.message


def test_the_plan_of_a_single_source():
    plain = to_plain(RunConfig())
    plain["training"] |= {"steps": 10, "sequence_length": 64, "global_batch_size": 16}
    plan = resolve(from_plain(RunConfig, plain), CPUS).plan
    found = plan_data(plan, counts(data=100_000))
    assert found.run["data"].samples == 160 and not found.problems
    assert found.stages[0].sources["data"].share == 1


def test_the_reason_why_a_source_is_never_drawn_is_reported():
    cases = (
        ({"a": {"weight": 1}, "b": {"tokens": 10**9}}, [], "take all of the run's 102,400"),
        ({"a": {"weight": 1e-7}, "b": {"weight": 0.9999999}}, [], "less than one sample"),
        ({"a": {"weight": 1}, "b": {"weight": 1}}, [{"weights": {"b": 1}}], "weights of its own"),
    )
    for sources, stages, why in cases:
        found = plan_data(plan_of(sources, stages), counts(a=10_000, b=10_000))
        assert any(why in problem.message for problem in found.problems), why
