"""Real ranks for tests: gloo processes that train one case after the other in one process start."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.schema import Accelerator, DataConfig, DataKind, ModelConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.plan.resolve import resolve
from trainctl.plan.types import RunPlan
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.train.prepare import prepare


@dataclass(frozen=True)
class Case:
    """A plan to train in a run directory."""

    plan: RunPlan
    run: RunPaths
    attempt: int = 1


def tiny_config(**training: Any) -> RunConfig:
    """A model of 0.1 million parameters on 1.5 MB of the standard library."""
    config = RunConfig()
    config.model = ModelConfig(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=176,
        num_layers=3,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    config.data = DataConfig(kind=DataKind.stdlib, max_bytes=1_500_000)
    config.zero_stage.param_persistence_threshold = 1000
    config.zero_stage.sub_group_size = 60_000
    config.zero_stage.reduce_bucket_size = 500_000
    config.zero_stage.allgather_bucket_size = 500_000
    config.zero_stage.prefetch_bucket_size = 100_000
    values = {"sequence_length": 128, "global_batch_size": 8, "evaluation_samples": 8, "seed": 7}
    for name, value in {**values, "gradient_accumulation_steps": 2, **training}.items():
        setattr(config.training, name, value)
    return config


def tiny_plan(config: RunConfig, world_size: int) -> RunPlan:
    """The plan on that many processes; fails on any finding that is an error."""
    hardware = Hardware(
        name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=world_size
    )
    resolution = resolve(config, hardware)
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def train_cases(world_size: int, cases: list[Case], *, probe: str = "") -> list[dict[str, Any]]:
    """Train every case on `world_size` processes; what `probe` returned, by rank.

    A process can hold one ZeRO-3 engine in its life (a second one hangs in DeepSpeed), so at most
    one case is at stage 3.

    Args:
        probe: ``module:function`` called as ``function(cases, process)`` in place of training.
    """
    for case in cases:
        attempt = case.run.attempt(case.attempt)
        attempt.root.mkdir(parents=True, exist_ok=True)
        write_json(attempt.plan, to_plain(case.plan))
        prepare(case.plan, case.run)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    work = pickle.dumps((cases, probe))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(work)
        rank.stdin.close()
        rank.stdin = None
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    for rank, (_, error) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, error.decode()[-3000:]
    return [json.loads(output.decode().splitlines()[-1]) for output, _ in outputs]


def curve(run: RunPaths) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step."""
    steps = step_curve(read_events(run.events))
    return {step: (event["loss"], event["grad_norm"]) for step, event in steps.items()}


def with_stop(plan: RunPlan, step: int) -> RunPlan:
    """The plan, ending its launch at `step`."""
    return replace(plan, stop_step=step)


class _Watched:
    """The training data of a rank, with a record of the samples that it really gave out."""

    def __init__(self, data: Any, case: Case) -> None:
        self._data = data
        self._path = case.run.root / f"seen-{case.attempt}.jsonl"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int) -> Any:
        batches = self._data.step(first_sample)
        ids = [int(sample) for batch in batches for sample in batch.sample_ids]
        with self._path.open("a") as file:  # one short write: the ranks' lines do not mix
            file.write(json.dumps({"first": first_sample, "ids": ids}) + "\n")
        return batches


def _main() -> None:
    cases, probe = pickle.load(sys.stdin.buffer)
    import importlib

    import torch

    from trainctl.runs.records import EventWriter
    from trainctl.train.process import start_process, stop_process
    from trainctl.train.session import assemble
    from trainctl.train.trainer import Trainer

    torch.set_num_threads(1)
    process = start_process(cases[0].plan)
    result: Any = {}
    if probe:
        module, _, function = probe.partition(":")
        result = getattr(importlib.import_module(module), function)(cases, process)
    else:
        for case in cases:
            session = assemble(case.plan, case.run, process)
            session.training = _Watched(session.training, case)  # type: ignore[assignment]
            events = EventWriter(case.run.events, case.attempt) if process.is_first else None
            Trainer(session, events).train()
            process.barrier()
            session.engine.close()
    stop_process()
    print(json.dumps(result))


if __name__ == "__main__":
    _main()
