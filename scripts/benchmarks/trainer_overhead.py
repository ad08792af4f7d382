"""Tokens per second of trainctl's trainer over a bare DeepSpeed loop of the same model and data.

    python scripts/benchmarks/trainer_overhead.py [--pairs 5] [--steps 12] [OVERRIDE ...]

Both loops live in the same processes, on two engines with the same JSON, and take turns: trainer,
bare, trainer, bare, ... The bare loop is hand-written: transformers' own loss, `backward`, `step`,
and the loss read once a step. Target: a median ratio of at least 0.98.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from trainctl.config.compose import compose
from trainctl.data.prepare import prepare
from trainctl.hardware import resolve_hardware
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

# Neither loop evaluates, saves or samples: only the loop itself is measured.
FIXED = (
    "recipe=tiny",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "checkpoint.at_end=false",
    "training.steps=100000",
)


def main() -> None:
    """Start the ranks and print what the first one measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of each turn")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = compose([*FIXED, *arguments.overrides]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    with tempfile.TemporaryDirectory() as folder:
        run = RunPaths(Path(folder))
        prepare(plan, run)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(
            _rank, (plan, run, port, arguments.pairs, arguments.steps), nprocs=plan.mesh.world_size
        )
        turns = json.loads((run.root / "result.json").read_text())
    ratios = [ours / bare for ours, bare in turns]
    for ours, bare in turns:
        print(f"trainer {ours:10,.0f} tokens/s   bare {bare:10,.0f} tokens/s   {ours / bare:.3f}")
    print(f"median ratio {statistics.median(ratios):.3f} (aim: at least 0.98)")


def _rank(rank: int, plan: RunPlan, run: RunPaths, port: int, pairs: int, steps: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(plan.mesh.world_size),
        "LOCAL_WORLD_SIZE": str(plan.mesh.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from trainctl.engines.deepspeed.entry import DeepSpeedBackend
    from trainctl.engines.process import stop_process
    from trainctl.runs.records import EventWriter
    from trainctl.train.loop import Trainer
    from trainctl.train.session import assemble

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.mesh.world_size))
    process = DeepSpeedBackend().start_process(plan)
    session = assemble(plan, run, process)
    bare = _BareLoop(plan, session)
    events = EventWriter(run.events, 1) if process.is_first else None
    turns = []
    for turn in range(pairs + 1):  # the first pair warms up
        session.plan = replace(plan, stop_step=(turn + 1) * steps)
        ours = _timed(Trainer(session, events).train, process)
        theirs = _timed(lambda: bare.train(steps), process)
        tokens = steps * plan.batch.tokens_per_step
        turns.append((tokens / ours, tokens / theirs))
    if process.is_first:
        (run.root / "result.json").write_text(json.dumps(turns[1:]))
    process.barrier()
    session.engine.close()
    stop_process()


def _timed(loop: Any, process: Any) -> float:
    process.barrier()
    started = time.perf_counter()
    loop()
    process.barrier()
    return time.perf_counter() - started


class _BareLoop:
    """Hand-written loop around a DeepSpeed engine."""

    def __init__(self, plan: RunPlan, session: Any) -> None:
        import deepspeed
        from transformers import AutoModelForCausalLM

        from trainctl.options.precision import precision_of
        from trainctl.train.models.model import TORCH_TYPES, transformers_config

        config = plan.config
        dtype = TORCH_TYPES[precision_of(config.precision).format]
        model = AutoModelForCausalLM.from_config(transformers_config(config.model), dtype=dtype)
        # The same groups, because the configuration chooses the weights without weight decay.
        embedding = model.get_input_embeddings().weight
        decayed = [p for p in model.parameters() if p.dim() > 1 and p is not embedding]
        plain = [p for p in model.parameters() if p.dim() < 2 or p is embedding]
        groups = [
            {"params": decayed, "weight_decay": config.optimizer.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=groups, config=plan.deepspeed
        )
        self.training = session.training
        self.batch = plan.batch
        self.samples = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for batch in self.training.step(self.samples, self.batch):
                ids = batch.input_ids.to(self.engine.device)
                loss = self.engine(input_ids=ids, labels=ids, use_cache=False).loss
                self.engine.backward(loss)
                self.engine.step()
            loss.item()
            self.samples += self.batch.global_batch_size


if __name__ == "__main__":
    main()
