"""Memory and time of rollouts, in closed form; `tests/train/test_rollouts.py` measures them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from memory_plans import GIB, LLAMA_3_8B, make_plan

from trainctl.config.registry import new_section
from trainctl.memory.budget import budget
from trainctl.memory.rollout import ROLLOUT_BY_LAYER, SPARE_COLUMNS, RolloutSize
from trainctl.monitor.search_text import _PARTS
from trainctl.plans.types import RunPlan
from trainctl.tuning.speed import StepTime, step_time

SLOT = (512 + 4096 + SPARE_COLUMNS) * 2 * 32 * 8 * 128 * 2
"""Bytes of a slot: keys and values of 32 layers, 8 heads of 128, in bf16."""


def rollout_plan(*, objective: dict[str, Any] | None = None, **settings: Any) -> RunPlan:
    """Return a step of 16 answers to each of 16 prompts on 8 devices of 80 GB."""
    values = {"micro_batch": 1, "accumulation": 32, "sequence_length": 4608, **settings}
    plan = make_plan(LLAMA_3_8B, **values)
    keys = {"samples": 16, "max_answer_tokens": 4096, **(objective or {})}
    plan.config.objective = new_section("objective", "grpo", **keys)
    plan.config.activation_checkpointing = new_section("activation_checkpointing", "full")
    return replace(plan, hardware=replace(plan.hardware, memory_bandwidth_gb_per_second=3350.0))


def size(plan: RunPlan) -> RolloutSize:
    return RolloutSize.of(plan)


def test_8b_with_16_samples_of_4096_tokens_fits_on_8_devices_of_80_gb() -> None:
    plan = rollout_plan(zero_stage__stage=3)
    found = budget(plan)
    assert found.fits
    assert found.peak_phase == "rollout"
    assert found.components.key_value_cache == 32 * SLOT
    whole = 2 * 8_030_261_248 - 2 * 65 * 4096  # all but the norms, which are never partitioned
    persistent = found.worst_stage.moments["step"].gathered_parameters
    assert found.components.gathered_parameters - persistent == pytest.approx(whole, rel=1e-3)
    assert size(plan) == RolloutSize(answers=32, holds_weights=True)


def test_as_many_answers_as_memory_allows() -> None:
    def answers(**settings: Any) -> int:
        return size(rollout_plan(zero_stage__stage=3, **settings)).answers

    assert answers(accumulation=256) > 32
    assert answers(accumulation=256, tensor=2) > answers(accumulation=256)
    assert answers(objective={"rollout_batch_size": 5}) == 5
    assert answers(device_memory=None) == 32
    assert answers(device_memory=None, accumulation=256) == 64


def test_weights_are_gathered_for_each_token_only_where_they_do_not_fit() -> None:
    plan = rollout_plan(zero_stage__stage=3, device_memory=48 * GIB)
    small = rollout_plan(zero_stage__stage=3, device_memory=40 * GIB)
    assert size(plan).holds_weights and not size(small).holds_weights
    assert size(small).answers > size(plan).answers
    assert ROLLOUT_BY_LAYER in budget(small).phases
    assert step_time(small).rollout > 2 * step_time(rollout_plan(zero_stage__stage=3)).rollout


def test_an_answer_that_another_program_generates_takes_neither_memory_nor_time() -> None:
    plan = rollout_plan(zero_stage__stage=3, objective={"rollout": "vllm"})
    assert list(budget(plan).phases)[-1] == "step"
    assert step_time(plan).rollout == 0
    assert "rollout" not in step_time(plan).parts


def test_a_token_reads_the_weights_and_the_cache() -> None:
    """32 rows of 4,096 tokens, each with all weights and 32 half full slots, at 3.35 TB/s."""
    plan = rollout_plan(zero_stage__stage=2)
    read = 2 * 8.03e9 + 32 * SLOT * (512 + 2048) / (512 + 4096 + SPARE_COLUMNS)
    generating = 4096 * read / (0.75 * 3.35e12)
    prefill = 32 * 512 * 2 * 7.5e9 / 2e14
    assert step_time(plan).rollout == pytest.approx(generating + prefill, rel=0.02)
    assert step_time(plan).seconds > step_time(plan).rollout + step_time(plan).compute
    two = rollout_plan(zero_stage__stage=2, objective={"updates": 2, "rollout_batch_size": 64})
    scoring = step_time(two).compute / 3  # under the weights that the answers came from
    one = step_time(plan).rollout
    assert one / 2 < step_time(two).rollout - scoring < one


def test_every_part_of_a_step_has_a_name_in_the_text_of_a_plan() -> None:
    assert set(_PARTS) == {item.name for item in fields(StepTime)}
