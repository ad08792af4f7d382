"""The plan as a whole: frozen, complete, the same after a round trip, and light to make."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from plan_cases import config_with, cpus, gpus

from trainctl.config.codec import from_plain, to_plain
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve


def test_the_whole_plan_of_a_small_run():
    config = config_with(
        training__steps=None,
        training__tokens=1_000_000,
        training__global_batch_size=32,
        training__micro_batch_size=8,
        training__sequence_length=256,
        training__stop_after_steps=20,
        schedule__warmup_fraction=0.1,
    )
    plan = resolve(config, cpus(2)).plan
    assert plan is not None
    assert (plan.mesh.data, plan.mesh.world_size) == (2, 2)
    assert plan.batch.gradient_accumulation_steps == 2
    assert plan.batch.tokens_per_step == 32 * 256
    assert (plan.total_steps, plan.stop_step, plan.warmup_steps) == (123, 20, 12)
    why = {derived.key: derived.reason for derived in plan.derived}
    assert why["total_steps"] == "training.tokens 1_000_000 / 8_192 tokens per step, rounded up"
    assert why["training.gradient_accumulation_steps"] == "global 32 / (micro 8 x data 2)"
    assert why["warmup_steps"] == "schedule.warmup_fraction 0.1 x total_steps 123"


def test_the_config_is_not_written_back():
    config = config_with()
    before = to_plain(config)
    plan = resolve(config, gpus(8)).plan
    assert plan is not None and replace(plan.config, kernels=config.kernels) == config
    assert to_plain(config) == before


def test_a_plan_is_frozen():
    plan = resolve(config_with(), gpus(8)).plan
    with pytest.raises(FrozenInstanceError):
        plan.total_steps = 1


def test_a_plan_survives_its_json():
    config = config_with(parallelism__sequence=2, deepspeed={"dump_state": True})
    plan = resolve(config, gpus(8)).plan
    assert from_plain(RunPlan, json.loads(json.dumps(to_plain(plan)))) == plan


def test_an_error_leaves_no_plan_and_a_warning_does():
    assert resolve(config_with(training__steps=None), gpus(8)).plan is None
    resolution = resolve(
        config_with(schedule__warmup_tokens=100, schedule__warmup_steps=5), gpus(8)
    )
    assert resolution.plan is not None and len(resolution.findings) == 1


def test_a_run_of_no_steps_only_builds():
    plan = resolve(config_with(training__steps=0, schedule__warmup_steps=10), gpus(8)).plan
    assert plan is not None and plan.total_steps == 0


def test_planning_loads_no_framework():
    code = (
        "import sys, trainctl.rules.resolve, trainctl.plans.schedule, trainctl.hardware;"
        "print([n for n in ('torch', 'deepspeed', 'hydra', 'numpy') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
