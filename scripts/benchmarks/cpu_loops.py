"""Benchmark of trainctl and three hand-written training loops on a CPU, each run as a command.

    python scripts/benchmarks/cpu_loops.py [--turns 3] [--steps 60] [--cases zero1 zero3]

The same model trains on the same samples in two processes of this machine: with `trainctl launch`
and, started by torchrun, with a bare DeepSpeed loop, with transformers' Trainer and trainctl's
JSON, and with torch's FSDP2 (`plain_loops.py`). The commands take turns, so that other load of the
machine affects all of them. Everything is measured from outside, as users experience it:

- first step: from the command's start to the end of the first optimizer step;
- tokens/s: over the steps after the first quarter, and separately over the first ten;
- save: time that the loop is blocked by a checkpoint of weights and optimizer;
- resume: from the start of the resuming command to the end of its first step;
- memory: peak of all processes of a command together, shared pages counted once (PSS).

The first turn warms up, and the median of the others counts. A ratio is trainctl's figure over the
loop's in the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from trainctl.data.corpus import Corpus
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.train.data import PackedDataset

LOOPS = ("bare", "transformers", "fsdp2")
PLAIN = Path(__file__).with_name("plain_loops.py")
RESUMED_STEPS = 4
WARM_STEPS = 10
MODEL = (
    "model.vocab_size=2048 model.hidden_size=256 model.intermediate_size=704 model.num_layers=6 "
    "model.num_attention_heads=4 model.num_key_value_heads=4 model.tie_word_embeddings=false"
)
RUN = (
    "recipe=tiny hardware=2xcpu precision=fp32 schedule=constant schedule.warmup_steps=0 "
    "training.sequence_length=128 training.global_batch_size=8 training.micro_batch_size=2 "
    "training.evaluation_samples=0 training.sample_tokens=0 checkpoint.every_steps=null "
    "checkpoint.every_minutes=null data.max_bytes=4000000"
)
CASES = {"zero1": "zero_stage=1", "zero3": "zero_stage=3"}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one loop in one turn."""

    first_step: float
    """Seconds from the command's start."""
    tokens: float
    """Tokens per second of both processes, over the steps after the first quarter."""
    early_tokens: float
    """Tokens per second over the first ten steps after the first."""
    save: float
    """Seconds that the loop waits for a checkpoint."""
    resume: float
    """Seconds from the start of the resuming command to the end of its first step."""
    memory: int
    """Peak bytes of all processes together (PSS)."""


def measured(command: Sequence[str]) -> tuple[float, int]:
    """Run a command to its end; return its start time (seconds since the epoch) and its peak
    memory in bytes.
    """
    with tempfile.TemporaryFile() as output:
        began = time.time()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        most = [0]
        watch = threading.Thread(target=_watch, args=(process, most))
        watch.start()
        code = process.wait()
        watch.join()
        if code:
            output.seek(0)
            sys.exit(f"{' '.join(command)}\n{output.read().decode()[-3000:]}")
    return began, most[0]


def _watch(process: subprocess.Popen[bytes], most: list[int]) -> None:
    while process.poll() is None:
        total = 0
        with suppress(psutil.Error):
            parent = psutil.Process(process.pid)
            for one in (parent, *parent.children(recursive=True)):
                with suppress(psutil.Error):
                    total += one.memory_full_info().pss
        most[0] = max(most[0], total)
        time.sleep(2)  # taking the measurement costs milliseconds of the CPUs that train


def ours(folder: Path, case: str, steps: int) -> tuple[Measured, RunPaths]:
    run = RunPaths(folder / "trainctl")
    words = f"{RUN} {MODEL} {CASES[case]} training.steps={steps + RESUMED_STEPS}".split()
    command = [sys.executable, "-m", "trainctl"]
    began, memory = measured(
        [*command, "launch", *words, f"training.stop_after_steps={steps}", "--run-dir", run.root]  # type: ignore[list-item]
    )
    events = read_events(run.events)
    save = next(event["stall_seconds"] for event in events if event["event"] == "checkpoint")
    times = [record["time"] for record in step_curve(events).values()]
    again, _ = measured([*command, "resume", str(run.root), "training.stop_after_steps=null"])
    resumed = step_curve(read_events(run.events))[steps + 1]["time"] - again
    plan = read_plan(run.attempt(1).plan)
    return _of(plan, began, times, save, resumed, memory), run


def theirs(folder: Path, loop: str, job: dict[str, Any], plan: RunPlan) -> Measured:
    result, file = folder / f"{loop}.json", folder / f"{loop}.job"
    job = {**job, "checkpoints": str(folder / loop), "result": str(result)}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += [str(PLAIN), loop, str(file)]
    file.write_text(json.dumps({**job, "resumes": False}))
    began, memory = measured(command)
    first = json.loads(result.read_text())
    steps = job["steps"] + RESUMED_STEPS
    file.write_text(json.dumps({**job, "resumes": True, "steps": steps}))
    again, _ = measured(command)
    resumed = json.loads(result.read_text())["times"][0] - again
    return _of(plan, began, first["times"], first["save_seconds"], resumed, memory)


def _of(
    plan: RunPlan, began: float, times: list[float], save: float, resume: float, memory: int
) -> Measured:
    tokens, quarter = plan.batch.tokens_per_step, len(times) // 4
    return Measured(
        first_step=times[0] - began,
        tokens=tokens * (len(times) - 1 - quarter) / (times[-1] - times[quarter]),
        early_tokens=tokens * WARM_STEPS / (times[WARM_STEPS] - times[0]),
        save=save,
        resume=resume,
        memory=memory,
    )


def job_of(run: RunPaths, folder: Path, steps: int) -> tuple[dict[str, Any], RunPlan]:
    """Return the job description for the other loops and the plan of trainctl's run. Writes the
    samples to `folder`.
    """
    plan = read_plan(run.attempt(1).plan)
    model, optimizer = plan.config.model, plan.config.optimizer
    corpus, length = Corpus.load(run.corpus), plan.batch.sequence_length
    data = PackedDataset(corpus, corpus.train, sequence_length=length, mask_documents=False)
    samples = np.arange((steps + RESUMED_STEPS) * plan.batch.global_batch_size)
    np.save(folder / "ids.npy", data.micro_batch(samples).input_ids.numpy().astype(np.int32))
    return {
        "model": {
            "model_type": "llama",
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_key_value_heads,
            "max_position_embeddings": length,
            "tie_word_embeddings": False,
        },
        "dtype": "float32",
        "ids": str(folder / "ids.npy"),
        "steps": steps,
        "micro_batch_size": plan.batch.micro_batch_size,
        "accumulation": plan.batch.gradient_accumulation_steps,
        "lr": optimizer.lr,
        "betas": [optimizer.beta1, optimizer.beta2],
        "epsilon": optimizer.epsilon,
        "weight_decay": optimizer.weight_decay,
        "clip": optimizer.gradient_clipping,
        "deepspeed": json.loads(run.attempt(1).deepspeed.read_text()),
    }, plan


def turn(case: str, loops: Sequence[str], steps: int) -> dict[str, Measured]:
    """Run every loop once, one after the other, and return the measurements by loop."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        measurements = {}
        measurements["trainctl"], run = ours(folder, case, steps)
        job, plan = job_of(run, folder, steps)
        return measurements | {loop: theirs(folder, loop, job, plan) for loop in loops}


def row(case: str, loop: str, turns: list[dict[str, Measured]]) -> str:
    """Format a line of the table: medians, and in parentheses trainctl's figure divided by the
    loop's.
    """

    def cell(name: str, form: str, unit: float = 1.0) -> str:
        value = median(getattr(turn[loop], name) for turn in turns) / unit
        if loop == "trainctl":
            return f"{value:{form}}"
        ratios = [getattr(turn["trainctl"], name) / getattr(turn[loop], name) for turn in turns]
        return f"{value:{form}} ({median(ratios):.2f})"

    cells = [
        cell("first_step", ".1f"),
        cell("tokens", ",.0f"),
        cell("early_tokens", ",.0f"),
        cell("save", ".2f"),
        cell("resume", ".1f"),
        cell("memory", ".2f", 2**30),
    ]
    return f"| {case} | {loop} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=list(LOOPS))
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print("| | loop | first step, s | tokens/s | first ten | save, s | resume, s | memory, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for case in arguments.cases:
        turns: list[dict[str, Measured]] = []
        for number in range(arguments.turns + 1):
            steps = arguments.steps if number else WARM_STEPS + 1
            turns.append(turn(case, arguments.loops, steps))
            print(f"{case}, turn {number}: {turns[-1]}", file=sys.stderr, flush=True)
        del turns[0]  # the first turn compiles operators and reads libraries from the disk
        for loop in ("trainctl", *arguments.loops):
            print(row(case, loop, turns), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
