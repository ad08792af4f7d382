"""Benchmark of FSDP2 against ZeRO 3: step time and peak memory of a rank, as ratios.

Both train the same model on the same samples with `trainctl launch`, in turns, so that other load
of the machine affects both. Of each run the shortest step after the second counts, and the peak
resident memory of its first rank, imports included; of the turns, the median ratio. DeepSpeed gets
buckets of 4 million elements, since its default ones are for larger models.

    python scripts/benchmarks/engines.py [--turns 3] [--steps 6] [--precision fp32 bf16]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve

MODEL = (
    "model.vocab_size=8192 model.hidden_size=512 model.intermediate_size=1408 model.num_layers=8 "
    "model.num_attention_heads=8 model.num_key_value_heads=8 model.tie_word_embeddings=false"
)
RUN = (
    "recipe=tiny hardware=2xcpu zero_stage=3 training.sequence_length=64 schedule.warmup_steps=1 "
    "training.global_batch_size=8 training.micro_batch_size=4 training.evaluation_samples=0 "
    "training.sample_tokens=0 checkpoint.at_end=false checkpoint.every_steps=null"
)
TOKENS = 8 * 64
"""Tokens per step."""

BUCKETS = "zero_stage.reduce_bucket_size=4000000 zero_stage.prefetch_bucket_size=4000000"
ENGINES = {"deepspeed": BUCKETS, "fsdp2": ""}


def measured(folder: Path, engine: str, precision: str, steps: int) -> tuple[float, int, float]:
    """Return the seconds of the shortest step, the peak bytes of the first rank, and the last
    loss.
    """
    words = f"{RUN} {MODEL} {ENGINES[engine]} engine={engine} precision={precision}".split()
    command = [sys.executable, "-m", "trainctl", "launch", *words, f"training.steps={steps}"]
    command += ["--run-dir", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    records = list(step_curve(read_events(RunPaths(folder).events)).values())
    shortest = TOKENS / max(record["tokens_per_second"] for record in records[2:])
    return shortest, max(record["peak_bytes"]["host"] for record in records), records[-1]["loss"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    arguments = parser.parse_args()
    print(f"torch {torch.__version__}")
    print("| | ZeRO 3, s | FSDP2, s | ratio | ZeRO 3, MiB | FSDP2, MiB | ratio | losses apart |")
    print("|---|---|---|---|---|---|---|---|")
    for precision in arguments.precision:
        turns = []
        for _ in range(arguments.turns):
            with tempfile.TemporaryDirectory() as folder:
                turns.append(
                    [
                        measured(Path(folder) / engine, engine, precision, arguments.steps)
                        for engine in ENGINES
                    ]
                )
        seconds = [median(turn[engine][0] for turn in turns) for engine in (0, 1)]
        mib = [median(turn[engine][1] for turn in turns) / 2**20 for engine in (0, 1)]
        faster = median(ours[0] / theirs[0] for theirs, ours in turns)
        smaller = median(ours[1] / theirs[1] for theirs, ours in turns)
        apart = max(abs(ours[2] - theirs[2]) for theirs, ours in turns)
        print(
            f"| {precision} | {seconds[0]:.2f} | {seconds[1]:.2f} | {faster:.2f} | {mib[0]:.0f} "
            f"| {mib[1]:.0f} | {smaller:.2f} | {apart:.1e} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
