"""Tests of what a configuration key changes in the plan."""

from __future__ import annotations

import pytest

from trainctl.config.keys import leaves
from trainctl.launchers.planning import compose_config, plan_config
from trainctl.plans.types import RunPlan
from trainctl.tuning.value_explanation import derived_from


@pytest.fixture(scope="module")
def made() -> RunPlan:
    found = plan_config(
        compose_config(["recipe=7b-zero3", "hardware=8xh100-80g"], None)
    ).assessment.plan
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("optimizer.lr", {"optimizer.params.lr"}),
        ("optimizer.beta1", {"optimizer.params.betas"}),
        ("zero_stage.stage", {"zero_optimization.stage"}),
        ("schedule.kind", {"schedule.floor_ratio"}),
        ("schedule.warmup_steps", {"warmup_steps"}),
        ("schedule.warmup_fraction", set()),  # the recipe sets the steps
        ("training.tokens", {"total_steps", "stop_step"}),
        ("training.global_batch_size", {"train_batch_size"}),
        ("training.micro_batch_size", {"train_micro_batch_size_per_gpu"}),
        ("precision.compute", {"bf16.enabled", "fp16.enabled", "communication_data_type"}),
        ("hardware.devices_per_node", {"world_size", "parallelism.data"}),
        ("model.mup", set()),
    ],
)
def test_a_key_and_what_comes_from_it(made: RunPlan, key: str, names: set[str]) -> None:
    found = {item.key for item in derived_from(key, made)}
    assert names <= found if names else found == set()


def test_every_key_can_be_requested(made: RunPlan) -> None:
    for key in leaves():
        for item in derived_from(key, made):
            assert item in made.derived
