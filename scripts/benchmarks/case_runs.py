"""A case of the GPU check, run in this process as the only rank."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from benchmarks import ceilings, peers
from benchmarks.meter import Meter
from gpu_cases import CEILINGS, TRAINCTL, Case, overrides, write_pairs

from trainctl.config.compose import compose
from trainctl.config.schema import Accelerator
from trainctl.data.prepare import prepare
from trainctl.engines.deepspeed.entry import DeepSpeedBackend
from trainctl.errors import TrainctlError
from trainctl.hardware import resolve_hardware
from trainctl.memory.budget import budget
from trainctl.plans.flops import flops_of_run
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.files import write_text
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.runs.status import Heartbeat
from trainctl.train.callbacks.trace_summary import read_trace, summarize
from trainctl.train.loop import train_rank
from trainctl.tuning.speed import step_time

Publish = Callable[[dict[str, Any]], None]


def run_case(case: Case, *, folder: Path, on_gpu: bool) -> None:
    """Run a case, and write its measurements to `result.json` in the folder as they come.

    Raises:
        TrainctlError: The configuration has no plan, or trainctl's rank fails.
    """
    began = time.monotonic()
    result: dict[str, Any] = {}

    def publish(measured: dict[str, Any]) -> None:
        result.update(measured, took=time.monotonic() - began)
        write_text(folder / "result.json", json.dumps(result))

    if case.loop == CEILINGS:
        publish({"ceilings": ceilings.measure(is_small=not on_gpu)})
        return
    _become_the_only_rank()
    write_pairs(folder / "pairs.jsonl")
    plan = plan_of(overrides(case, folder=folder, on_gpu=on_gpu))
    publish(_facts(plan))
    trace = folder / "trace.json"
    if case.loop == TRAINCTL:
        trace = _run_trainctl(plan, case, folder, publish)
    else:
        _run_peer(plan, case, trace, publish)
    if case.steps.profiled:
        publish({"profile": asdict(summarize(read_trace(trace), case.steps.profiled))})


def plan_of(words: list[str]) -> RunPlan:
    """Return the plan of a configuration.

    Raises:
        TrainctlError: A rule refuses the configuration.
    """
    config = compose(words).config
    found = resolve(config, resolve_hardware(config.hardware))
    if found.plan is None:
        raise TrainctlError.from_findings([each for each in found.findings if each.is_error])
    return found.plan


def _become_the_only_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _facts(plan: RunPlan) -> dict[str, Any]:
    """Return what is known of a case before it runs."""
    peak, planned = plan.hardware.peak_tflops(plan.config.precision.compute), budget(plan)
    tokens = plan.batch.tokens_per_step
    return {
        "tokens_per_step": tokens,
        "flops_per_step": tokens * flops_of_run(plan.config, plan.batch.sequence_length),
        "peak_tflops": peak,
        "predicted_seconds": None if peak is None else step_time(plan).seconds,
        "planned_bytes": planned.device_peak_bytes,
        "planned_low_bytes": planned.device_peak_low_bytes,
        "planned_high_bytes": planned.device_peak_high_bytes,
    }


def _run_trainctl(plan: RunPlan, case: Case, folder: Path, publish: Publish) -> Path:
    """Train as a rank of `trainctl launch` does; return the path of the trace."""
    run = RunPaths(folder / "run")
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    prepare(plan, run)
    train_rank(plan, run, 1, Heartbeat(attempt.heartbeat(0)))
    events, steps = read_events(run.events), case.steps
    timed = range(steps.warm + 1, steps.warm + steps.timed + 1)
    records = step_curve(events)
    early, at_end = (event for event in events if event["event"] == "memory")
    memory = early if steps.profiled else at_end  # the profiler's buffers would count
    publish(
        {
            "seconds": [records[step]["seconds"]["total"] for step in timed],
            "peak_bytes": memory["measured"]["device_peak_bytes"],
        }
    )
    return attempt.profile / "rank-0.trace.json.gz"


def _run_peer(plan: RunPlan, case: Case, trace: Path, publish: Publish) -> None:
    if plan.hardware.accelerator is Accelerator.cpu:
        # With trainctl's patches: DeepSpeed would compile an all-reduce of its own.
        device = DeepSpeedBackend().start_process(plan).device
    else:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        deepspeed.init_distributed("nccl")
    torch.manual_seed(0)
    peers.LOOPS[case.loop](plan, Meter(case.steps, device, publish=publish, trace=trace))
