"""Cost of the records of a long run: bytes of its files, and time and memory of their readers.

    python scripts/benchmarks/records.py [--steps 1000000] [--keep FOLDER]

The steps have the columns of `recipe=125m`: two parameter groups, the times of a step's parts and
peaks of memory, with an evaluation and a checkpoint every thousand steps. Each reader runs in a
process of its own, whose CPU time and peak memory are printed.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.runs import records
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, round_measured

EVERY = 1000
"""Steps between two evaluations, and two checkpoints."""

READERS = {
    "resume: the two steps that it compares": "from trainctl.runs.records import steps_from_end\n"
    "steps_from_end(events, (steps - 999, steps - 998))",
    "runs status": "from trainctl.cli.main import run\nassert run(['runs', 'status', folder]) == 0",
    "runs ls": "from trainctl.cli.main import run\nassert run(['runs', 'ls', parent]) == 0",
    "runs logs": "from trainctl.cli.main import run\nassert run(['runs', 'logs', folder]) == 0",
    "sweep's table: the last held-out loss": "from trainctl.runs.sweeps import _held_out_loss\n"
    "from trainctl.runs.layout import RunPaths\n_held_out_loss(RunPaths(events.parent))",
    "one pass over all records": "from trainctl.runs.records import iter_events\n"
    "assert sum(event['event'] == 'step' for event in iter_events(events)) == steps",
    "a launch with a time limit": "from trainctl.launchers.stop import TimeLimit\n"
    "from trainctl.runs.records import iter_events\n"
    "TimeLimit(60, iter_events(events, 'step', 'checkpoint', 'weights'))",
}


def main() -> None:
    """Write the records, read them, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="write the run into this folder and keep it")
    arguments = parser.parse_args()
    parent = arguments.keep or Path(tempfile.mkdtemp())
    try:
        run = _make(parent / "run", arguments.steps)
        size = sum(file.stat().st_size for file in records.record_files(run.events))
        print(
            f"{arguments.steps:,} steps: {size / 1e6:,.1f} MB, "
            f"{size / arguments.steps:.0f} bytes a step"
        )
        for name, code in READERS.items():
            print(f"{name}: {_read(run, code, arguments.steps)}")
    finally:
        if arguments.keep is None:
            shutil.rmtree(parent)


def _make(folder: Path, steps: int) -> RunPaths:
    config = compose(["recipe=125m", "hardware=8xh100-80g"]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    run = create_run(config, run_dir=folder)
    new_attempt(run, plan)
    # There is no other writer here, and a lock costs more than a line.
    records._locked = lambda *_: nullcontext()  # type: ignore[assignment]
    draw = random.Random(0)
    started = time.process_time()
    with EventWriter(run.events, 1) as events:
        events.write("launch", host="node-0", pid=1, ranks=8)
        for step in range(1, steps + 1):
            events.write("step", **_step(step, draw))
            if step % EVERY == 0:
                events.write("evaluation", step=step, loss=2 + 8 / math.sqrt(step + draw.random()))
                events.write(
                    "checkpoint", step=step, path=f"checkpoints/step-{step:08}", seconds=1.5
                )
    print(f"written in {(time.process_time() - started) / steps * 1e6:.0f} us a step")
    return run


def _step(step: int, draw: random.Random) -> dict[str, Any]:
    noise, rate = draw.gauss(0, 0.02), 6e-4 * (0.55 + 0.45 * math.cos(step * 3.1e-6))
    norms = [abs(draw.gauss(0.5, 0.1)), abs(draw.gauss(0.3, 0.1))]
    seconds = {name: round(abs(draw.gauss(mean, mean / 50)), 6) for name, mean in PARTS.items()}
    if step % EVERY == 1 and step > 1:
        seconds |= {"evaluation": round(draw.gauss(3, 0.1), 6), "checkpoint": 0.41}
    speed = 524288 / seconds["total"]
    return {
        "step": step,
        "loss": 2 + 8 / math.sqrt(step + 1) + noise,
        "learning_rate": rate,
        "learning_rates": {"decayed": rate, "undecayed": rate},
        "grad_norm": math.hypot(*norms),
        "grad_norms": {"decayed": round_measured(norms[0]), "undecayed": round_measured(norms[1])},
        "tokens": step * 524288,
        "tokens_per_second": round_measured(speed),
        "mfu": round_measured(speed / 2.9e6),
        "seconds": seconds,
        "peak_bytes": {"allocated": 31_138_512_896, "host": 4_113_103_360 + step // 5000 * 4096},
        "samples": [(step - 1) * 256, step * 256],
    }


PARTS = {
    "total": 0.4312,
    "data": 0.00012,
    "forward": 0.1201,
    "backward": 0.2702,
    "optimizer": 0.031,
}


def _read(run: RunPaths, code: str, steps: int) -> str:
    """Return CPU seconds and peak memory of a reader, less those of an empty process."""
    head = (
        "import resource, sys, json\nfrom pathlib import Path\nimport trainctl.cli.runs\n"
        f"events, folder, parent, steps = Path({str(run.events)!r}), {str(run.root)!r}, "
        f"{str(run.root.parent)!r}, {steps}\n"
    )
    foot = (
        "\nused = resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss]), file=sys.stderr)"
    )
    measurements = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", head + body + foot], capture_output=True, check=True
            ).stderr.splitlines()[-1]
        )
        for body in ("", code)
    ]
    (idle, base), (busy, peak) = measurements
    return (
        f"{max(0.0, busy - idle):.2f} s, {max(0, peak - base) / 1024:.1f} MiB over an empty process"
    )


if __name__ == "__main__":
    main()
