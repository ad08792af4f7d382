"""Keys of DeepSpeed's that are passed through train as without them, on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity_cases import Difference, enlarge
from rank_processes import Case, curve, tiny_config, tiny_plan, train_cases, with_stop

from trainctl.config.codec import flatten
from trainctl.config.derived import DerivedValue
from trainctl.plans.deepspeed import nest_settings
from trainctl.rules.passed_keys import PASS_THROUGH_KEYS
from trainctl.runs.layout import RunPaths

ZERO = "zero_optimization"
PROFILER = {
    "flops_profiler.enabled": True,
    "flops_profiler.profile_step": 1,
    "flops_profiler.module_depth": 1,
    "flops_profiler.top_modules": 2,
    "flops_profiler.detailed": False,
    "flops_profiler.recompute_fwd_factor": 1.0,
    "flops_profiler.output_file": None,  # a file of the test's
}
COMMUNICATION = {
    "comms_logger.enabled": True,
    "comms_logger.verbose": True,
    "comms_logger.debug": True,
    "comms_logger.prof_all": False,
    "comms_logger.prof_ops": ["all_reduce"],
}
REPORTS = {
    "memory_breakdown": True,
    "dump_state": True,
    "disable_python_gc": True,
    "timers.throughput.enabled": True,
    "timers.throughput.synchronized": False,
}
CASES = {
    "alone": ({"zero_stage__stage": 0}, [PROFILER, REPORTS, {"prescale_gradients": True}]),
    "stages": (
        {"zero_stage__stage": 1, "parallelism__pipeline": 2},
        [REPORTS, {"prescale_gradients": True}],
    ),
    "whole gradients": (
        {"zero_stage__stage": 2, "zero_stage__reduce_scatter": False},
        [{"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}],
    ),
    "whole gradients of partitions": (
        {"zero_stage__stage": 3, "zero_stage__reduce_scatter": False},
        [{"gradient_predivide_factor": 4.0}],  # 2.0, the number of ranks, is TC431
    ),
    **{
        f"stage {stage}": (
            {"zero_stage__stage": stage},
            [
                {f"{ZERO}.parameter_alignment": True},
                {f"{ZERO}.use_multi_rank_bucket_allreduce": False},
                {f"{ZERO}.ignore_unused_parameters": False},
                COMMUNICATION,
            ],
        )
        for stage in (1, 2)
    },
    "stage 3": (
        {"zero_stage__stage": 3},
        [
            {f"{ZERO}.enable_sanity_checks": True},
            {f"{ZERO}.log_trace_cache_warnings": True},
            {f"{ZERO}.stage3_allgather_sequential": True},
            {f"{ZERO}.stage3_model_persistence_threshold": 100},
            {f"{ZERO}.stage3_use_all_reduce_for_fetch_params": True},
            PROFILER,
            {**REPORTS, "timers.throughput.enabled": False},
        ],
    ),
    "stage 3, processes of its own": (
        {"zero_stage__stage": 3},
        [{f"{ZERO}.memory_efficient_linear": False}],  # the default replaces a function of torch's
    ),
}
"""Layouts by name, each with sets of passed-through keys to train with and without.
"""
TUNED = {
    "aio.block_size": 131_072,
    "aio.queue_depth": 4,
    "aio.intra_op_parallelism": 2,
    "aio.single_submit": True,
    "aio.overlap_events": False,
}
STEPS = 4


def config(keys, **changes):
    made = tiny_config(
        steps=STEPS,
        sequence_length=32,
        evaluation_samples=0,
        optimizer__lr=1e-3,
        optimizer__gradient_clipping=0.5,  # always active
        schedule__warmup_steps=2,
        checkpoint__every_steps=2,
        **changes,
    )
    made.deepspeed = nest_settings(
        [DerivedValue(key=key, value=keys[key], reason="") for key in keys]
    )
    return made


def assert_same_curve(run, reference):
    assert list(curve(run)) == list(range(1, STEPS + 1))
    difference = Difference.between(curve(reference), curve(run))
    assert difference.within(Difference(1e-6, 1e-6)), (run, difference)


def test_every_key_that_is_passed_through_is_in_a_case():
    listed = {key for _, cases in CASES.values() for keys in cases for key in keys}
    assert listed | {*TUNED} == {*PASS_THROUGH_KEYS}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_passed_through_changes_no_loss_and_no_norm(name, tmp_path):
    """Each run is stopped half way and resumed: the keys must not move states in a checkpoint."""
    layout, cases = CASES[name]
    plans, runs = [], []
    for number, keys in enumerate([{}, *cases]):
        profile = tmp_path / f"{number}.txt"
        if keys is PROFILER:
            keys = {**keys, "flops_profiler.output_file": str(profile)}
        plans.append(tiny_plan(config(keys, **layout), 2))
        runs.append(RunPaths(tmp_path / str(number)))
    together = "own" not in name
    first = [Case(with_stop(plan, 2), run) for plan, run in zip(plans, runs, strict=True)]
    train_cases(2, first, together=together)
    rest = [Case(plan, run, attempt=2) for plan, run in zip(plans, runs, strict=True)]
    train_cases(2, rest, together=together)
    for run in runs[1:]:
        assert_same_curve(run, runs[0])
    profiles = [path.read_text() for path in tmp_path.glob("*.txt")]
    assert len(profiles) == cases.count(PROFILER)
    assert all("flops" in text.lower() for text in profiles)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what swaps when it is first used
def test_tuning_for_nvme_changes_no_loss_and_no_norm(tmp_path):
    if not Path("/usr/include/libaio.h").exists():
        pytest.skip("needs the headers of libaio (Debian's libaio-dev)")
    runs = []
    for name, keys in (("reference", {}), ("tuned", TUNED)):
        made = config(
            keys,
            zero_stage__stage=3,
            offload__optimizer="nvme",
            offload__nvme_path=str(tmp_path / "nvme"),
        )
        enlarge(made)
        plan = tiny_plan(made, 2)
        assert {**dict(flatten(plan.deepspeed)), **keys} == dict(flatten(plan.deepspeed))
        runs.append(RunPaths(tmp_path / name))
        train_cases(2, [Case(plan, runs[-1])])
    assert_same_curve(runs[1], runs[0])
