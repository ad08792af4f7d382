"""Stages in steps and counters, weights as exact fractions: without a text."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import config_with, gpus

from trainctl.config.schema import SourceConfig, StageConfig
from trainctl.memory.budget import budget, device_budget
from trainctl.plans.mixture import (
    StagedBatches,
    are_valid_weights,
    batch_of_length,
    exact_fraction,
    largest_batches,
    shares_of_quotas,
    sources_of,
    stages_of,
    stages_of_plan,
)
from trainctl.plans.types import Batch
from trainctl.rules.resolve import resolve


def batch(size=48, micro=4, accumulation=3, length=64):
    return Batch(
        global_batch_size=size,
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        sequence_length=length,
    )


def stages(*found, **changes):
    config = config_with(
        training__sequence_length=64,
        training__global_batch_size=48,
        training__micro_batch_size=2,
        data__stages=[{**found_one} for found_one in found],
        **changes,
    )
    plan = resolve(config, gpus(4)).plan
    assert plan is not None, resolve(config, gpus(4)).findings
    return stages_of(config.data, config.training, config.schedule, plan.batches, plan.total_steps)


def test_a_run_without_stages_has_one():
    (stage,) = stages()
    assert (stage.first_step, stage.end_step, stage.first_sample) == (0, 100, 0)
    assert (stage.samples, stage.tokens, stage.weights) == (4800, 4800 * 64, None)
    config = config_with()
    assert sources_of(config.data) == {"data": config.data}


def test_stages_end_by_share_tokens_and_steps_and_keep_the_tokens_of_a_batch():
    first, second, third, last = stages(
        {"until": 0.2},
        {"until_tokens": 48 * 64 * 30 + 1, "sequence_length": 32},
        {"until_step": 90},
        {"sequence_length": 16},
    )
    ends = [each.end_step for each in (first, second, third, last)]
    assert ends == [20, 31, 90, 100]
    assert (second.first_sample, second.samples, second.sequence_length) == (960, 11 * 96, 32)
    assert third.first_sample == 960 + 11 * 96
    assert (last.samples, last.tokens) == (10 * 48 * 4, 10 * 48 * 64)
    assert second.sample_of(22) == 960 + 2 * 96


def test_a_ramp_changes_how_many_counters_a_step_takes_and_nothing_else():
    ramp = [{"until_steps": 10, "global_batch_size": 16}]
    first, second = stages({"until": 0.05, "sequence_length": 32}, {}, training__batch_ramp=ramp)
    assert (first.end_step, first.samples) == (5, 5 * 32)
    assert second.samples == 5 * 16 + 90 * 48
    assert second.sample_of(10) == 5 * 32 + 5 * 16


def test_a_share_is_where_the_decay_of_wsd_begins():
    for unit in ("steps", "tokens"):
        changes = {
            "schedule__kind": "wsd",
            "schedule__unit": unit,
            "training__steps": 137,
            "training__batch_ramp": [{"until_steps": 40, "global_batch_size": 16}],
        }
        first, _ = stages({"until": 0.8}, {}, **changes)
        config = config_with(
            training__sequence_length=64,
            training__global_batch_size=48,
            training__micro_batch_size=2,
            schedule__decay_fraction=0.2,
            **changes,
        )
        plan = resolve(config, gpus(4)).plan
        (stable,) = [each.value for each in plan.derived if each.key == "stable_steps"]
        assert abs(first.end_step - stable) <= 1


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 8), st.integers(1, 12), st.integers(1, 97)
)
def test_a_batch_of_another_length_has_the_same_tokens_and_no_more_at_once(
    micro, accumulation, ranks, unit, length
):
    before = batch(micro * accumulation * ranks, micro, accumulation, unit * 8)
    after = batch_of_length(before, length)
    if after is None:
        tokens = before.tokens_per_step
        assert tokens % (length * ranks) or length > micro * unit * 8
    else:
        assert after.tokens_per_step == before.tokens_per_step
        assert after.micro_batch_size * length <= micro * unit * 8
        made = after.micro_batch_size * after.gradient_accumulation_steps * ranks
        assert made == after.global_batch_size
        assert batch_of_length(before, before.sequence_length) == before


def test_weights_are_what_was_written():
    assert exact_fraction(0.7) + exact_fraction(0.1) + exact_fraction(0.2) == 1 and exact_fraction(
        1e-7
    ) == Fraction(1, 10**7)
    assert (
        are_valid_weights([0.7, 0.1, 0.2])
        and are_valid_weights([7, 3])
        and are_valid_weights([1 / 4, 3 / 4])
    )
    assert not are_valid_weights([0.7, 0.2]) and not are_valid_weights([1.5, 3])


def test_tokens_and_epochs_come_first_and_weights_share_what_they_leave():
    sources = {
        "a": SourceConfig(tokens=100),
        "b": SourceConfig(epochs=1.5),
        "c": SourceConfig(weight=0.25),
        "d": SourceConfig(weight=0.75),
        "later": SourceConfig(),
    }
    lengths = dict.fromkeys(sources, 200)
    assert shares_of_quotas(sources, lengths, 1000) == {
        "a": 100,
        "b": 300,
        "c": 150,
        "d": 450,
    }
    only = {name: sources[name] for name in "ab"}
    assert shares_of_quotas(only, lengths, 1000) == {"a": 100, "b": 300}
    assert shares_of_quotas(sources, lengths, 300)["d"] == 0


def staged():
    """24 samples a step of 64 tokens to step 5, 48 of 32 to step 7, then 24 of 64 again."""
    config = config_with(
        training__sequence_length=64,
        training__global_batch_size=24,
        training__micro_batch_size=2,
        training__steps=10,
        data__stages=[{"until_step": 5}, {"until_step": 7, "sequence_length": 32}, {}],
    )
    plan = resolve(config, gpus(4)).plan
    assert not plan.not_yet and isinstance(config.data.stages[0], StageConfig)
    return plan, StagedBatches(stages_of_plan(plan))


def test_the_batch_of_a_step_follows_its_stage():
    plan, batches = staged()
    samples = 0
    for step in range(10):
        first, made = batches.at(step, samples)
        assert first == samples
        assert made.tokens_per_step == plan.batch.tokens_per_step
        assert made.sequence_length == (32 if 5 <= step < 7 else 64)
        samples += made.global_batch_size
    assert samples == 8 * 24 + 2 * 48
    (one,) = stages_of_plan(resolve(config_with(), gpus(1)).plan)
    assert (one.first_step, one.first_sample, one.weights) == (0, 0, None)


@given(st.lists(st.integers(0, 60), min_size=10, max_size=10))
def test_behind_batches_that_were_passed_over_a_batch_has_samples_of_one_stage(passed_over):
    """The sample counter decides the stage, so a batch never mixes stages of different lengths."""
    _, batches = staged()
    bounds = [stage.first_sample for stage in batches.stages]
    samples = 0
    for step, extra in enumerate(passed_over):
        first, made = batches.at(step, samples + extra)
        assert samples + extra <= first < samples + extra + 24 * 2
        of_first, of_last = (
            sum(bound <= counter for bound in bounds)
            for counter in (first, first + made.global_batch_size - 1)
        )
        assert of_first == of_last
        assert made.sequence_length == batches.stages[of_first - 1].sequence_length
        if first > samples + extra:
            assert first in bounds
        samples = first + made.global_batch_size


def test_memory_is_budgeted_for_the_fullest_length():
    plan, _ = staged()
    assert [batch.sequence_length for batch in largest_batches(plan)] == [64, 32]
    longer = config_with(
        training__sequence_length=64,
        training__global_batch_size=24,
        training__micro_batch_size=6,
        model__attention="eager",
        data__stages=[{"until": 0.5}, {"sequence_length": 384}],
    )
    made = resolve(longer, gpus(1)).plan
    alone = replace(made, config=replace(longer, data=replace(longer.data, stages=[])))
    assert budget(made).device_peak_bytes > budget(alone).device_peak_bytes
    assert device_budget(made).device_peak_bytes == budget(made).device_peak_bytes


@pytest.mark.parametrize("length", [32, 64])
def test_a_stage_has_the_length_of_its_samples(length):
    (stage,) = stages({"sequence_length": length})
    assert stage.sequence_length == length
