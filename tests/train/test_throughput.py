"""Tests of a run's records of speed, time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_processes import Case, tiny_config, tiny_plan, train_cases

from trainctl.config.schema import Accelerator, DataType
from trainctl.memory.budget import budget
from trainctl.plans.flops import flops_per_token
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.train.callbacks.steps import Throughput, host_bytes_in_device_peak, peak_memory

PEAK_TFLOPS = 0.5
STEPS = 5


def plan(world_size: int, peak: float | None, *, stages: int = 1) -> RunPlan:
    config = tiny_config(steps=STEPS, evaluate_every_steps=3)
    config.parallelism.pipeline = stages
    config.precision.compute = DataType.fp32
    config.checkpoint.every_steps = 3
    config.logging.profile_steps = [4, 4]
    config.logging.profile_ranks = [world_size - 1]
    made = tiny_plan(config, world_size)
    return replace(made, hardware=replace(made.hardware, peak_tflops_fp32=peak))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunPaths]:
    """Five steps on two ranks, evaluated and saved after the third and the last, in two layouts."""
    folder = tmp_path_factory.mktemp("runs")
    layouts = {"data": 1, "pipeline": 2}
    paths = {name: RunPaths(folder / name) for name in layouts}
    cases = [
        Case(plan(2, PEAK_TFLOPS, stages=stages), paths[name]) for name, stages in layouts.items()
    ]
    train_cases(2, cases, together=True)
    return paths


@pytest.fixture(scope="module")
def run(runs: dict[str, RunPaths]) -> RunPaths:
    """Paths of the data-parallel run."""
    return runs["data"]


def of_kind(run: RunPaths, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run.events) if event["event"] == kind]


def test_utilisation_matches_the_recorded_speed(run: RunPaths) -> None:
    per_token = flops_per_token(plan(2, None).config.model, 128)
    for step in of_kind(run, "step"):
        flops = step["tokens_per_second"] * per_token
        assert step["mfu"] == pytest.approx(flops / (2 * PEAK_TFLOPS * 1e12))
        assert 0 < step["mfu"] < 1


@pytest.mark.parametrize("layout", ["data", "pipeline"])
def test_a_step_s_time_is_split_and_nothing_is_counted_twice(
    runs: dict[str, RunPaths], layout: str
) -> None:
    steps = of_kind(runs[layout], "step")
    for step in steps:
        parts = dict(step["seconds"])
        total = parts.pop("total")
        assert {"data", "forward", "backward", "optimizer"} <= set(parts)
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) <= total
    # What follows a step's record is in the next one: after the third, and not before.
    with_save = [step["step"] for step in steps if "checkpoint" in step["seconds"]]
    with_evaluation = [step["step"] for step in steps if "evaluation" in step["seconds"]]
    assert with_save == with_evaluation == [4]
    # Each record begins where the last one ended.
    elapsed = steps[-1]["time"] - steps[0]["time"]
    assert sum(step["seconds"]["total"] for step in steps[1:]) == pytest.approx(elapsed, rel=0.5)


def test_memory_is_compared_with_the_plan_s_when_it_is_steady_and_at_the_end(
    run: RunPaths,
) -> None:
    early, last = of_kind(run, "memory")
    assert (early["step"], early["at_end"]) == (2, False)
    assert (last["step"], last["at_end"]) == (STEPS, True)
    planned = budget(plan(2, None))
    beside = host_bytes_in_device_peak(plan(2, None), planned)
    assert last["planned"]["device_peak_bytes"] == planned.device_peak_bytes + beside
    assert last["planned"]["device_peak_high_bytes"] == planned.device_peak_high_bytes + beside
    own = of_kind(run, "step")[-1]["peak_bytes"]
    assert own["allocated"] is None and own["host"] > 2**26
    # The fullest rank's, so at least the first's own; on a CPU a device is a process.
    measured = last["measured"]
    assert measured["device_peak_bytes"] == measured["host_peak_bytes"] >= own["host"]
    assert measured["allocated_peak_bytes"] is None


def test_on_a_cpu_what_is_kept_on_the_host_is_resident_in_the_same_process() -> None:
    nvme = {f"offload__{states}": "nvme" for states in ("optimizer", "parameters")}
    config = tiny_config(steps=STEPS, zero_stage__stage=3, offload__nvme_path="/drive", **nvme)
    made = tiny_plan(config, 2)
    planned = budget(made)
    beside = host_bytes_in_device_peak(made, planned)
    buffers = config.offload.buffer_count * config.offload.buffer_size * 4
    assert buffers <= beside < buffers + 2**25
    assert planned.host.bytes_per_node == pytest.approx(
        2 * (planned.device_peak_bytes + beside), abs=2
    )
    on_gpus = replace(made, hardware=replace(made.hardware, accelerator=Accelerator.cuda))
    assert host_bytes_in_device_peak(on_gpus, planned) == 0


def test_only_the_chosen_rank_is_profiled(run: RunPaths) -> None:
    names = {path.name for path in run.attempt(1).profile.iterdir()}
    assert names == {"rank-1.trace.json.gz", "rank-1.txt"}
    assert of_kind(run, "profile") == []  # a record is of what the first rank has written


def test_the_peak_of_a_format_that_is_not_used_does_not_count() -> None:
    """fp32 products in TF32 are neither at the fp32 peak nor planned."""
    made = plan(1, PEAK_TFLOPS)
    bf16 = replace(made, hardware=replace(made.hardware, peak_tflops_fp32=None, peak_tflops_bf16=1))
    assert Throughput(bf16).of_step(1.0, plan(1, PEAK_TFLOPS).batch)["mfu"] is None
    assert Throughput(made).of_step(1.0, plan(1, PEAK_TFLOPS).batch)["mfu"] is not None


@pytest.fixture
def tf32() -> Iterator[None]:
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = False


def test_tf32_has_no_known_peak(tf32: None) -> None:
    assert Throughput(plan(1, PEAK_TFLOPS)).of_step(1.0, plan(1, PEAK_TFLOPS).batch)["mfu"] is None


@pytest.mark.slow
def test_the_peak_stays_when_memory_is_given_back() -> None:
    before = peak_memory(torch.device("cpu")).host_peak_bytes
    size = before + 2**27
    block = np.ones(size, dtype=np.uint8)
    del block
    peak = peak_memory(torch.device("cpu"))
    assert peak.host_peak_bytes >= size
    assert peak.device_peak_bytes == peak.host_peak_bytes


@pytest.mark.gpu
def test_what_lies_outside_the_allocator_is_on_the_device_too() -> None:
    device = torch.device("cuda")
    block = torch.zeros(2**28, dtype=torch.uint8, device=device)
    peak = peak_memory(device)
    assert peak.allocated_peak_bytes is not None and peak.reserved_peak_bytes is not None
    assert peak.allocated_peak_bytes >= block.numel()
    assert peak.reserved_peak_bytes >= peak.allocated_peak_bytes
    # The driver's context and loaded kernels take a few hundred MiB.
    assert peak.device_peak_bytes > peak.allocated_peak_bytes + 2**26
    assert Path("/proc/self/status").is_file() and peak.host_peak_bytes > 0
