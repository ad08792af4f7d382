"""CPU time and kernels of a step on one process, each case over ZeRO 1: what Python costs.

    python scripts/benchmarks/host_time.py [--steps 12] [--blocks 28] [--only CASE] [OVERRIDE ...]

The model is so narrow that its kernels take almost nothing. On a GPU the same Python runs on the
host, which the device waits for if its kernels take less. Each case trains in a process of its own.
The least process time of a step counts: other load of the machine makes steps longer only. One more
step is counted: operations that a GPU would start a kernel for, and reads of a single number that
its host would wait for. The last column is the norm and the update for each tensor, in starts of a
small kernel (`precision=bf16 optimizer.fused=true`), without kernels of lists of tensors: a GPU
runs these at once, a CPU tensor by tensor. `PYTHONPATH` with the folder of another commit measures
that one.
"""

from __future__ import annotations

import argparse
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch.utils._python_dispatch import TorchDispatchMode

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.compose import compose
from trainctl.data.prepare import prepare
from trainctl.hardware import resolve_hardware
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

FIXED = [
    "recipe=tiny",
    "hardware=1xcpu",
    "precision=fp32",
    "model=qwen3-0.6b",
    "model.hidden_size=64",
    "model.intermediate_size=176",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.head_dim=16",
    "model.vocab_size=512",
    "training.sequence_length=16",
    "training.micro_batch_size=1",
    "training.gradient_accumulation_steps=2",
    "training.steps=1000",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "training.global_batch_size=null",
    "checkpoint.every_steps=null",
    "checkpoint.every_minutes=null",
    "checkpoint.at_end=false",
]
ZERO_3 = "zero_stage=3 zero_stage.param_persistence_threshold=1000"
CASES = {
    "zero1": "zero_stage=1",
    "zero0": "zero_stage=0",
    "zero2": "zero_stage=2",
    "zero3": ZERO_3,
    "fsdp2": "engine=fsdp2 zero_stage=3",
    "zero3, lora": f"{ZERO_3} adapter=lora adapter.rank=8",
    "zero3, documents": f"{ZERO_3} data.mask_documents=true",
    "zero3, by module": f"{ZERO_3} zero_stage.gather=modules",
    "zero3, full": f"{ZERO_3} activation_checkpointing=full",
    "zero3, selective": f"{ZERO_3} activation_checkpointing=selective",
}
WARM_STEPS = 3
"""Steps before those that count: DeepSpeed records the order of the modules in the first."""


def main() -> None:
    """Print the time of each case, and its ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=28)
    parser.add_argument("--only", action="append", choices=CASES, help="case to measure")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    first = None
    for name in arguments.only or CASES:
        layers = f"model.num_layers={arguments.blocks}"
        config = compose([*FIXED, layers, *CASES[name].split(), *arguments.overrides]).config
        plan = resolve(config, resolve_hardware(config.hardware)).plan
        assert plan is not None, name
        seconds, kernels, reads, starts = measured(plan, arguments.steps)
        first = first or seconds
        print(
            f"{name:18}{1000 * seconds:8.0f} ms{seconds / first:8.2f}"
            f"{kernels:8.0f} kernels{reads:6.0f} reads{starts:8.1f} starts",
            flush=True,
        )


def measured(plan: RunPlan, steps: int) -> tuple[float, ...]:
    """Return the least process time of a step of a fresh process, its kernels, its reads, and the
    kernel starts that the update of a tensor takes.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, result = RunPaths(Path(folder) / "run"), Path(folder) / "found"
        run.root.mkdir()
        prepare(plan, run)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        multiprocessing.spawn(_rank, (to_plain(plan), run, port, steps, result), nprocs=1)
        return tuple(float(each) for each in result.read_text().split())


def _rank(rank: int, plain: Any, run: RunPaths, port: int, steps: int, result: Path) -> None:
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from trainctl.engines.process import stop_process
    from trainctl.engines.protocol import engine_backend
    from trainctl.train.session import assemble

    torch.set_num_threads(1)
    plan = from_plain(RunPlan, plain)
    session = assemble(plan, run, engine_backend(plan).start_process(plan))
    session.engine.set_learning_rate(1.0)
    counts, in_update = _Counts(), _Counts()
    times = []
    for step in range(WARM_STEPS + steps):
        begun = time.process_time()
        _accumulate(session, step)
        summed = time.process_time()
        _update(session)
        ended = time.process_time()
        times.append((ended - begun, ended - summed, _kernel_start()))
    with counts:
        _accumulate(session, WARM_STEPS + steps)
    with in_update:
        _update(session)
    least, update, start = map(min, zip(*times[WARM_STEPS:], strict=True))
    tensors = len(session.state.fragments)
    starts = (update - in_update.in_lists) / tensors / start
    kernels, reads = counts.kernels + in_update.kernels, counts.reads + in_update.reads
    result.write_text(f"{least} {kernels} {reads} {starts}")
    session.engine.close()
    stop_process()


def _accumulate(session: Any, step: int) -> None:
    batch = session.plan.batch
    session.engine.accumulate(session.training.step(step * batch.global_batch_size, batch))


def _update(session: Any) -> None:
    session.engine.update(norm=session.gradients.norms().total, clip_at=1.0)


def _kernel_start() -> float:
    small, begun = torch.ones(64), time.process_time()
    for _ in range(2000):
        small.add_(1.0)
    return (time.process_time() - begun) / 2000


class _Counts(TorchDispatchMode):
    """Kernels and reads of the device of what runs within it; a view and an `empty` start none.
    `in_lists` are the seconds in kernels of lists of tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.reads = 0
        self.in_lists = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("aten._local_scalar_dense"):
            self.reads += 1
        elif not func.is_view and not name.startswith(("aten.empty", "aten.detach", "prim.")):
            self.kernels += 1
        begun = time.process_time()
        result = func(*args, **(kwargs or {}))
        if "_foreach_" in name or "_fused_" in name:
            self.in_lists += time.process_time() - begun
        return result


if __name__ == "__main__":
    main()
