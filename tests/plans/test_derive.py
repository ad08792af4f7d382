"""Batch arithmetic, mesh and lengths, over all sizes rather than examples."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import config_with, gpus

from trainctl.config.schema import (
    ObjectiveConfig,
    ParallelismConfig,
    ScheduleConfig,
    TrainingConfig,
)
from trainctl.options.objective.grpo import GrpoConfig
from trainctl.plans.derive import (
    derive_batch,
    derive_mesh,
    derive_stop_step,
    derive_total_steps,
    derive_warmup_steps,
    divisors,
    nearest_divisors,
)
from trainctl.plans.types import Batches
from trainctl.rules.resolve import resolve

sizes = st.integers(1, 64)


@given(number=st.integers(1, 5000), wanted=st.integers(1, 6000))
def test_divisors_are_all_and_the_nearest_are_next_to_the_wanted_one(number, wanted):
    every = [size for size in range(1, number + 1) if number % size == 0]
    assert divisors(number) == every
    below = [size for size in every if size <= wanted]
    above = [size for size in every if size > wanted]
    assert nearest_divisors(number, wanted) == below[-1:] + above[:1]


@given(micro=sizes, accumulation=sizes, data=sizes, left_out=st.integers(0, 3))
def test_any_one_size_follows_from_the_other_two(micro, accumulation, data, left_out):
    given_sizes = [micro * accumulation * data, micro, accumulation, None]
    given_sizes[left_out] = None
    training = TrainingConfig(
        global_batch_size=given_sizes[0],
        micro_batch_size=given_sizes[1],
        gradient_accumulation_steps=given_sizes[2],
    )
    batch, reasons = derive_batch(training, data)
    assert batch is not None
    assert batch.global_batch_size == micro * accumulation * data
    assert (batch.micro_batch_size, batch.gradient_accumulation_steps) == (micro, accumulation)
    named = ["global_batch_size", "micro_batch_size", "gradient_accumulation_steps"]
    expected = {f"training.{named[left_out]}"} if left_out < 3 else set()
    assert {reason.key for reason in reasons} == expected | {"tokens_per_step"}


@given(asked=st.none() | sizes, micro=st.none() | sizes, accumulation=st.none() | sizes, data=sizes)
def test_a_batch_is_exact_or_none(asked, micro, accumulation, data):
    training = TrainingConfig(
        global_batch_size=asked, micro_batch_size=micro, gradient_accumulation_steps=accumulation
    )
    batch, _ = derive_batch(training, data)
    if batch is None:
        assert asked is not None
        return
    product = batch.micro_batch_size * batch.gradient_accumulation_steps * data
    assert batch.global_batch_size == product
    assert asked in (None, batch.global_batch_size)
    assert micro in (None, batch.micro_batch_size)
    assert accumulation in (None, batch.gradient_accumulation_steps)


def test_open_sizes_are_one_and_only_a_global_size_accumulates():
    batch, _ = derive_batch(TrainingConfig(), 8)
    assert (batch.global_batch_size, batch.micro_batch_size) == (8, 1)
    batch, _ = derive_batch(TrainingConfig(global_batch_size=64), 8)
    assert (batch.micro_batch_size, batch.gradient_accumulation_steps) == (1, 8)


@given(asked=sizes, micro=sizes, accumulation=sizes, data=sizes)
def test_the_nearest_legal_batches_of_a_message_are_legal(asked, micro, accumulation, data):
    config = config_with(
        training__global_batch_size=asked,
        training__micro_batch_size=micro,
        training__gradient_accumulation_steps=accumulation,
    )
    findings = [f for f in resolve(config, gpus(data)).findings if f.rule == "TC020"]
    if asked == micro * accumulation * data:
        assert not findings
        return
    (finding,) = findings
    pairs = re.findall(r"(\d+) \(accumulation (\d+)\)", finding.hint)
    triples = [(legal, micro, passes) for legal, passes in pairs]
    same = re.findall(r"(?:size=(\d+) training\.)?\S*accumulation_steps=(\d+)", finding.hint)
    triples += [(asked, other or micro, passes) for other, passes in same]
    assert triples
    for legal, each, passes in triples:
        config.training.global_batch_size = int(legal)
        config.training.micro_batch_size = int(each)
        config.training.gradient_accumulation_steps = int(passes)
        assert resolve(config, gpus(data)).plan is not None, finding.hint


def test_the_message_of_an_impossible_batch():
    config = config_with(
        training__global_batch_size=64,
        training__micro_batch_size=4,
        training__gradient_accumulation_steps=2,
    )
    (finding,) = resolve(config, gpus(6)).findings
    assert finding.message == "train_batch_size=64 but micro 4 x accumulation 2 x data 6 = 48"
    assert finding.hint == (
        "the same batch on 4 devices (data 4); else on these, "
        "nearest legal: 48 (accumulation 2) or 72 (accumulation 3)"
    )


@pytest.mark.parametrize(
    ("micro", "accumulation", "overrides"),
    [
        (3, None, {"micro_batch_size": 2}),
        (3, 2, {"micro_batch_size": 2, "gradient_accumulation_steps": 4}),
        (None, 3, {"gradient_accumulation_steps": 2}),
        (4, 4, {"gradient_accumulation_steps": 2}),
    ],
)
def test_what_keeps_the_batch_comes_first_and_is_legal(micro, accumulation, overrides):
    asked = {"training__global_batch_size": 32, "training__micro_batch_size": micro}
    asked["training__gradient_accumulation_steps"] = accumulation
    (finding,) = resolve(config_with(**asked), gpus(4)).findings
    positions = [finding.hint.index(f"training.{key}={n}") for key, n in overrides.items()]
    assert max(positions) < finding.hint.index(" or ")
    same = asked | {f"training__{key}": n for key, n in overrides.items()}
    plan = resolve(config_with(**same), gpus(4)).plan
    assert plan is not None and plan.batch.global_batch_size == 32


@given(tensor=st.integers(1, 8), pipeline=st.integers(1, 8), sequence=st.integers(1, 8), data=sizes)
def test_the_data_axis_takes_what_is_left(tensor, pipeline, sequence, data):
    axes = ParallelismConfig(tensor=tensor, pipeline=pipeline, sequence=sequence)
    world = tensor * pipeline * sequence * data
    mesh, _ = derive_mesh(axes, gpus(world))
    assert mesh is not None
    assert (mesh.data, mesh.world_size) == (data, world)
    if tensor * pipeline * sequence > 1:
        assert derive_mesh(axes, gpus(world + 1))[0] is None


@given(tokens=st.integers(1, 10**9), global_batch=sizes, length=st.integers(2, 4096))
def test_a_token_budget_is_met_by_the_fewest_steps(tokens, global_batch, length):
    training = TrainingConfig(tokens=tokens, global_batch_size=global_batch, sequence_length=length)
    batch, _ = derive_batch(training, 1)
    steps, _ = derive_total_steps(training, Batches.of((), batch), ObjectiveConfig())
    assert (steps - 1) * batch.tokens_per_step < tokens <= steps * batch.tokens_per_step


@given(samples=st.integers(1, 10**6), global_batch=sizes, answers=st.integers(2, 64))
def test_two_epochs_draw_each_sample_twice_with_all_its_answers(samples, global_batch, answers):
    tokens = 512 * samples + 1
    training = TrainingConfig(steps=None, epochs=2.0, epoch_tokens=tokens, sequence_length=512)
    training.global_batch_size = global_batch
    batch, _ = derive_batch(training, 1)
    steps, _ = derive_total_steps(training, Batches.of((), batch), GrpoConfig(samples=answers))
    assert (steps - 1) * global_batch < 2 * samples * answers <= steps * global_batch


@given(total=st.integers(0, 10**6), fraction=st.floats(0, 1))
def test_a_warmup_share_is_the_nearest_step_inside_the_run(total, fraction):
    batch, _ = derive_batch(TrainingConfig(), 1)
    batches = Batches.of((), batch)
    steps, _ = derive_warmup_steps(ScheduleConfig(warmup_fraction=fraction), total, batches)
    assert 0 <= steps <= total
    assert abs(steps - fraction * total) <= 0.5 + 1e-9 * total


def test_a_launch_stops_early_but_never_late():
    assert derive_stop_step(TrainingConfig(stop_after_steps=20), 40)[0] == 20
    assert derive_stop_step(TrainingConfig(stop_after_steps=50), 40)[0] == 40
    assert derive_stop_step(TrainingConfig(), 40)[0] == 40


@given(
    tokens=st.integers(1, 10**9),
    length=st.integers(2, 8192),
    data=sizes,
    micro=st.none() | sizes,
    accumulation=st.none() | sizes,
)
def test_a_batch_in_tokens_is_the_nearest_that_ranks_share(
    tokens, length, data, micro, accumulation
):
    training = TrainingConfig(
        global_batch_tokens=tokens,
        sequence_length=length,
        micro_batch_size=micro,
        gradient_accumulation_steps=None if micro else accumulation,
    )
    batch, reasons = derive_batch(training, data)
    assert batch is not None
    each = data * (micro or accumulation or 1)
    count = batch.global_batch_size
    assert count % each == 0
    assert count == each or abs(count - tokens / length) <= each / 2
    reason = next(item for item in reasons if item.key == "training.global_batch_size")
    assert ("nearest multiple" in reason.reason) == (count * length != tokens)


def test_both_sizes_of_a_micro_batch_have_to_agree_with_the_tokens():
    def batch_of(accumulation):
        training = TrainingConfig(
            global_batch_tokens=4_000_000,
            sequence_length=8192,
            micro_batch_size=2,
            gradient_accumulation_steps=accumulation,
        )
        return derive_batch(training, 64)[0]

    assert batch_of(4) is not None
    assert batch_of(3) is None
