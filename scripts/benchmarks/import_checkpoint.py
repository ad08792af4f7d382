"""Memory and speed of an import: a synthetic ZeRO 3 directory of DeepSpeed becomes a run.

The directory has the layout of a Llama with Adam's states (12 bytes a parameter). The import runs
as `trainctl checkpoint import` runs it, in a process of its own, whose anonymous memory is watched:
mapped files and the page cache do not count. Target: two of the largest tensors, above what the
process needs for its imports.

    python scripts/benchmarks/import_checkpoint.py [--gigabytes 8] [--ranks 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainctl.config.codec import to_plain
from trainctl.config.schema import Accelerator
from trainctl.hardware import Hardware
from trainctl.launchers.planning import compose_config
from trainctl.plans.shapes import all_tensors
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.files import write_json

POLL_SECONDS = 0.02
MIB = 2**20
STEP = 500

LAYER_PARAMETERS = 4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048
VOCABULARY = 32_000


def plan_of(num_bytes: float) -> RunPlan:
    """Return the plan of a model whose weights and states have about so many bytes."""
    layers = max(1, round((num_bytes / 12 - VOCABULARY * 2048) / LAYER_PARAMETERS))
    shape = f"hidden_size=2048 intermediate_size=5504 num_attention_heads=16 num_layers={layers}"
    keys = [f"model.{each}" for each in shape.split()]
    keys += [f"model.vocab_size={VOCABULARY}", "model.num_key_value_heads=16", "model.head_dim=128"]
    composed = compose_config(
        ["recipe=tiny", *keys, "model.tie_word_embeddings=true", "training.steps=1000"], None
    )
    hardware = Hardware(
        name="cpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=1, host_memory_bytes=None
    )
    plan = resolve(composed.config, hardware).plan
    assert plan is not None
    return plan


def save_rank(folder: Path, shapes: dict[str, torch.Size], rank: int, ranks: int) -> None:
    """Save a rank's files from mapped noise, so that nothing of them is in memory."""
    numel = sum(math.ceil(shape.numel() / ranks) for shape in shapes.values())
    noise = folder.parent / "noise"
    if not noise.exists():
        with noise.open("wb") as file:
            for start in range(0, numel, 1 << 22):
                file.write(torch.rand(min(1 << 22, numel - start)).numpy().tobytes())
    flats = [torch.from_file(str(noise), size=numel) for _ in range(3)]
    counters = {"global_steps": STEP, "global_samples": STEP * 16, "skipped_steps": 0}
    model = {"module": {}, "buffer_names": [], "param_shapes": [shapes], "ds_version": "0.19.8"}
    torch.save(model | counters, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    states = {0: {"step": torch.tensor(float(STEP)), "exp_avg": flats[1], "exp_avg_sq": flats[2]}}
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    optimizer = {
        "zero_stage": 3,
        "partition_count": ranks,
        "optimizer_state_dict": {"state": states, "param_groups": [group]},
        "fp32_flat_groups": [flats[0]],
    }
    file = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": optimizer}, file)


def anonymous_bytes(pid: int) -> Iterator[int]:
    """Yield the anonymous memory of a process, until it ends."""
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        found = [line for line in lines if line.startswith("RssAnon:")]
        if not found:  # it has ended and is not waited for
            return
        yield int(found[0].split()[1]) * 1024
        time.sleep(POLL_SECONDS)


def measure(plan: RunPlan, source: Path, folder: Path) -> dict[str, Any]:
    """Import in a process of its own; return its memory and its time."""
    file = folder / "plan.json"
    write_json(file, to_plain(plan))
    places = {"directory": source, "run_dir": folder / "run", "plan": file}
    options = json.dumps({**places, "argv": [], "format": None}, default=str)
    command = [sys.executable, "-m", "trainctl.migration", "import", options]
    peak, before = 0, 0
    lines: list[tuple[float, dict[str, Any]]] = []
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:

        def read() -> None:
            assert process.stdout is not None
            lines.extend((time.monotonic(), json.loads(line)) for line in process.stdout)

        reader = threading.Thread(target=read)
        reader.start()
        for found in anonymous_bytes(process.pid):
            if not lines:
                before = max(before, found)
            peak = max(peak, found)
        reader.join()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    (first, _), (ended, answer) = lines[0], lines[-1]
    return {
        "bytes": answer["result"]["size_bytes"],
        "seconds": ended - first,
        "seconds_before": first - began,
        "processor_seconds": used.ru_utime + used.ru_stime,
        "peak": peak,
        "before": before,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    plan = plan_of(arguments.gigabytes * 1e9)
    tensors = list(all_tensors(plan.config.model))
    shapes = {tensor.name: torch.Size(tensor.shape) for tensor in tensors}
    largest = max(shape.numel() for shape in shapes.values()) * 4
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary:
        source = Path(temporary) / "source" / f"global_step{STEP}"
        source.mkdir(parents=True)
        for rank in range(arguments.ranks):
            save_rank(source, shapes, rank, arguments.ranks)
        found = measure(plan, source, Path(temporary))
        began = time.monotonic()
        shutil.rmtree(source)
    above = found["peak"] - found["before"]
    rate = found["bytes"] / 1e6 / found["seconds"]
    print(
        f"{found['bytes'] / 1e9:.2f} GB of {arguments.ranks} ranks in {found['seconds']:.1f} s: "
        f"{rate:.0f} MB/s, after {found['seconds_before']:.1f} s; "
        f"{found['processor_seconds']:.1f} s of a processor in all"
    )
    print(
        f"anonymous memory: {found['peak'] / MIB:.0f} MiB at the most, {above / MIB:.0f} MiB above "
        f"the {found['before'] / MIB:.0f} MiB of its imports; two of the largest tensors have "
        f"{2 * largest / MIB:.0f} MiB (cleaned up in {time.monotonic() - began:.0f} s)"
    )


if __name__ == "__main__":
    main()
