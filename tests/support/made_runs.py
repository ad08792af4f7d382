"""Run directories without training: a real plan, and records as ranks write them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainctl.config.compose import compose
from trainctl.config.schema import Accelerator
from trainctl.hardware import Hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter

EVALUATED, SAVED = 20, 40
"""Steps between two evaluations, and between two checkpoints."""
START = 1.7e9
"""Unix seconds of the first record."""


def new_run(folder: Path, *overrides: str, nodes: int = 1, devices: int = 2) -> RunPaths:
    """Create a run with one attempt, planned for `nodes` x `devices` devices."""
    hardware = Hardware(
        name=f"{nodes}x{devices}",
        accelerator=Accelerator.cpu,
        nodes=nodes,
        devices_per_node=devices,
    )
    composed = compose(["recipe=tiny", *overrides])
    plan = resolve(composed.config, hardware).plan
    assert plan is not None
    run = create_run(composed.config, run_dir=folder, folder=folder.parent)
    new_attempt(run, plan)
    return run


def append(run: RunPaths, records: Iterator[dict[str, Any]]) -> None:
    """Append records as ranks do."""
    with ExitStack() as stack:
        writers: dict[int, EventWriter] = {}
        for record in records:
            number = record["attempt"]
            if number not in writers:
                writers[number] = stack.enter_context(EventWriter(run.events, number))
            own = {k: v for k, v in record.items() if k not in ("schema", "attempt", "event")}
            writers[number].write(record["event"], **own)


def append_lines(run: RunPaths, records: Iterator[dict[str, Any]]) -> None:
    """Append records as early versions did, with steps as lines of `events.jsonl`."""
    with run.events.open("a") as stream:
        for record in records:
            stream.write(json.dumps(record).replace("NaN", '"NaN"') + "\n")


def step(number: int, *, attempt: int = 1, time: float = START, **fields: Any) -> dict[str, Any]:
    """Return the `step` record of two ranks that take half a second."""
    return {
        "schema": 1,
        "attempt": attempt,
        "time": time,
        "event": "step",
        "step": number,
        "loss": 2.0 + 3.0 * math.exp(-number / 50),
        "learning_rate": 1e-3,
        "learning_rates": {"decayed": 1e-3},
        "grad_norm": 1.0,
        "tokens": number * 4096,
        "tokens_per_second": 8192.0,
        "mfu": None,
        "seconds": {"total": 0.5, "forward": 0.2, "backward": 0.25},
        "peak_bytes": {"allocated": None, "host": 5 << 20},
        "samples": [16 * number - 16, 16 * number],
        **fields,
    }


def other(event: str, *, attempt: int = 1, time: float = START, **fields: Any) -> dict[str, Any]:
    """Return a record of another kind."""
    return {"schema": 1, "attempt": attempt, "time": time, "event": event, **fields}


def drawn(seed: int, steps: int) -> Iterator[dict[str, Any]]:
    """Draw records up to a step, with occasional rewinds within an attempt or with a new
    attempt.
    """
    chance = random.Random(seed)
    attempt, number, time = 1, 0, START
    yield other("launch", host="a", pid=1, ranks=2)
    while number < steps:
        number, time = number + 1, time + 0.5
        loss = chance.choice([chance.random(), chance.random(), math.nan])
        yield step(number, attempt=attempt, time=time, loss=loss)
        if number % EVALUATED == 0:
            yield other("evaluation", attempt=attempt, time=time, step=number, loss=chance.random())
        if chance.random() < 0.02:
            if chance.random() < 0.5:
                attempt += 1
                time += 10
                yield other("launch", attempt=attempt, time=time, host="a", pid=1, ranks=2)
            number = chance.randrange(max(0, number - 30), number + 1)
