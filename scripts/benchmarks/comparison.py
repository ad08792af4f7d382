"""Benchmark of trainctl and other training loops on the same configuration.

Each trains in processes of its own, one after the other on the same devices: trainctl by its
command, the others by `peers.py` with the plan, the JSON and the corpus of that launch.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainctl.plans.flops import flops_per_token, utilisation
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events, step_curve
from trainctl.tuning.speed import step_time

PEERS = Path(__file__).with_name("peers.py")
TIMEOUT_SECONDS = 1200
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Row:
    """Measurements of one loop in one configuration."""

    case: str
    loop: str
    """«trainctl», or a loop of `peers.py`."""
    tokens_per_second: float | None = None
    """Throughput of all devices together, the median of the repeats."""
    predicted_tokens_per_second: float | None = None
    """Throughput predicted by the plan; only for trainctl, None without known rates."""
    mfu: float | None = None
    """Model FLOPs utilisation; None without a known peak."""
    ratio: float | None = None
    """trainctl's tokens per second over this loop's, in the same run."""
    peak_bytes: int | None = None
    """Measured peak memory of a device (on a CPU: of a process)."""
    planned_bytes: int | None = None
    """The plan's prediction of `peak_bytes`; only for trainctl."""
    planned_low_bytes: int | None = None
    """Lower end of the plan's range."""
    planned_high_bytes: int | None = None
    problem: str = ""
    """Why there are no figures; empty when there are."""


class Failed(Exception):
    """Failure of a loop to reach its end; the text gives the reason."""


def measure(
    case: str, overrides: Sequence[str], *, warmup: int, peers: Sequence[str], repeats: int = 1
) -> Iterator[Row]:
    """Measure a configuration and yield a row per loop; only trainctl's row if its launch fails.

    Args:
        warmup: Steps that are not measured.
        peers: Loops of `peers.py` that train the same configuration.
        repeats: Number of runs of every loop; the median counts.
    """
    ours: list[Row] = []
    theirs: dict[str, list[Row]] = {peer: [] for peer in peers}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats):
            run = RunPaths(Path(folder) / str(repeat))
            try:
                ours.append(_trainctl(case, run, overrides, warmup))
            except Failed as failure:
                yield Row(case=case, loop="trainctl", problem=str(failure))
                return
            for loop, rows in theirs.items():
                rows.append(_peer(case, loop, run, warmup))
    own = _median(ours)
    yield own
    for rows in theirs.values():
        row = _median(rows)
        if row.tokens_per_second and own.tokens_per_second:
            row = replace(row, ratio=own.tokens_per_second / row.tokens_per_second)
        yield row


def _trainctl(case: str, run: RunPaths, overrides: Sequence[str], warmup: int) -> Row:
    command = [sys.executable, "-m", "trainctl", "launch", *overrides, "--run-dir", str(run.root)]
    _complete(command, dict(os.environ))
    plan = read_plan(run.attempt(1).plan)
    events = read_events(run.events)
    steps = step_curve(events)
    seconds = steps[plan.stop_step]["time"] - steps[warmup]["time"]
    memory = next(event for event in events if event["event"] == "memory" and event["at_end"])
    planned = memory["planned"]
    return Row(
        case=case,
        loop="trainctl",
        **_speed(plan, seconds / (plan.stop_step - warmup)),
        predicted_tokens_per_second=_predicted(plan),
        peak_bytes=memory["measured"]["device_peak_bytes"],
        planned_bytes=planned["device_peak_bytes"],
        planned_low_bytes=planned["device_peak_low_bytes"],
        planned_high_bytes=planned["device_peak_high_bytes"],
    )


def _predicted(plan: RunPlan) -> float | None:
    if plan.hardware.peak_tflops(plan.config.precision.compute) is None:
        return None
    return plan.batch.tokens_per_step / step_time(plan).seconds


def _peer(case: str, loop: str, run: RunPaths, warmup: int) -> Row:
    plan = read_plan(run.attempt(1).plan)
    result = run.root / f"{loop}.json"
    try:
        _start_ranks([str(PEERS), loop, str(run.root), str(result), str(warmup)], plan)
    except Failed as failure:
        return Row(case=case, loop=loop, problem=str(failure))
    ranks = [
        json.loads(result.with_name(f"{result.name}.{rank}").read_text())
        for rank in range(plan.mesh.world_size)
    ]
    return Row(
        case=case,
        loop=loop,
        **_speed(plan, max(rank["seconds_per_step"] for rank in ranks)),
        peak_bytes=max(rank["device_peak_bytes"] for rank in ranks),
    )


def _start_ranks(script: list[str], plan: RunPlan) -> None:
    """Run the script as every rank of the plan."""
    size = plan.mesh.world_size
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu" if plan.hardware.accelerator.value == "cpu" else "cuda",
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size))
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(size):
            with (Path(folder) / str(rank)).open("w") as log:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, *script],
                        env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            codes = [rank.wait(timeout=TIMEOUT_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise Failed(f"not done after {TIMEOUT_SECONDS} s") from None
        finally:
            for rank in ranks:
                rank.kill()
        for rank, code in enumerate(codes):
            if code:
                raise Failed(_last_line((Path(folder) / str(rank)).read_text()))


def _complete(command: list[str], environment: dict[str, str]) -> None:
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"not done after {TIMEOUT_SECONDS} s") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
        raise Failed(errors[0][:160] if errors else _last_line(done.stderr))


def _last_line(text: str) -> str:
    """Return the last line that names an error, else the last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line]
    return (named or lines or ["no output"])[-1][:160]


def _speed(plan: RunPlan, seconds_per_step: float) -> dict[str, float | None]:
    tokens = plan.batch.tokens_per_step
    flops = tokens * flops_per_token(plan.config.model, plan.batch.sequence_length)
    peak = plan.hardware.peak_tflops(plan.config.precision.compute)
    devices = plan.mesh.world_size
    return {
        "tokens_per_second": tokens / seconds_per_step,
        "mfu": utilisation(flops, seconds_per_step, devices=devices, peak_tflops=peak),
    }


def _median(rows: list[Row]) -> Row:
    """Return the repeat with the median speed; the first failed repeat if one failed."""
    failed = [row for row in rows if row.problem]
    if failed:
        return failed[0]
    middle = statistics.median_low(row.tokens_per_second or 0.0 for row in rows)
    return next(row for row in rows if row.tokens_per_second == middle)


def table(rows: list[Row]) -> str:
    """Format the rows as a Markdown table."""
    lines = [
        "| configuration | loop | tokens/s | predicted | MFU | trainctl is | peak, GiB "
        "| planned, GiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.problem:
            lines.append(f"| {row.case} | {row.loop} | {row.problem} | | | | | |")
            continue
        planned = ""
        if row.planned_bytes is not None:
            low, high = (row.planned_low_bytes or 0) / GIB, (row.planned_high_bytes or 0) / GIB
            planned = f"{row.planned_bytes / GIB:.2f} ({low:.2f} to {high:.2f})"
        cells = [
            row.case,
            row.loop,
            f"{row.tokens_per_second:,.0f}",
            _text(row.predicted_tokens_per_second, ",.0f"),
            _text(row.mfu, ".1%"),
            _text(row.ratio, ".2f"),
            f"{(row.peak_bytes or 0) / GIB:.2f}",
            planned,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _text(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
