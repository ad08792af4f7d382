"""`python -m trainctl.launchers.agent.benchmark COMMAND ...`: measure a rank, then exec.

Before training, each rank multiplies matrices, and all ranks all-reduce a buffer together. A device
slower than its peers delays every step of all ranks. A network slower than it should be (a wrong
interface, a bad cable) shows here in seconds instead of in days.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import STORE_VARIABLE, RunTag, die_with_parent
from trainctl.runs.records import EventWriter

SLOW = 0.8
"""A rank below this share of the median speed is called slow."""

_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of work in one round."""

    width: int
    """Rows of the square matrices that are multiplied."""
    buffer_bytes: int


_SIZES = {Accelerator.cpu: Size(512, 4 << 20)}
_ON_DEVICES = Size(8192, 256 << 20)


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured speed of one rank."""

    rank: int
    """Global rank."""
    host: str
    tflops: float
    """Speed of matrix products, TFLOP/s."""


def main() -> int:
    """Measure, then exec the command. Return 4 if the network is slower than configured."""
    die_with_parent()
    tag = RunTag.from_environment(os.environ)
    assert tag.attempt is not None
    run = RunPaths(tag.directory)
    plan = read_plan(run.attempt(tag.attempt).plan)
    size = _SIZES.get(plan.hardware.accelerator, _ON_DEVICES)
    device = _join_ranks(plan)
    rank, world = dist.get_rank(), dist.get_world_size()
    speeds: list[Speed] = [Speed(0, "", 0.0)] * world
    dist.all_gather_object(
        speeds, Speed(rank, socket.gethostname(), _measure_tflops(size.width, device))
    )
    bandwidth = _measure_bandwidth(size.buffer_bytes, device)
    if rank == 0:
        with EventWriter(run.events, tag.attempt) as events:
            events.write(
                "benchmark",
                all_reduce_gb_per_second=bandwidth,
                buffer_bytes=size.buffer_bytes,
                speeds=[asdict(speed) for speed in speeds],
                slow=[asdict(speed) for speed in slow_ranks(speeds)],
            )
    dist.destroy_process_group()
    least = plan.config.launcher.min_bandwidth_gb_per_second
    if least is None or bandwidth >= least:
        os.execvp(sys.argv[1], sys.argv[1:])
    print(
        f"error: an all-reduce reaches {bandwidth:.2f} GB/s, and "
        f"launcher.min_bandwidth_gb_per_second={least:g}",
        file=sys.stderr,
        flush=True,
    )
    return int(ExitCode.environment)


def slow_ranks(speeds: Sequence[Speed]) -> list[Speed]:
    """Return the ranks that the others will wait for in every step."""
    usual = statistics.median(speed.tflops for speed in speeds)
    return [speed for speed in speeds if speed.tflops < SLOW * usual]


def _join_ranks(plan: RunPlan) -> torch.device:
    """Join the other ranks in a process group of its own; training creates its groups later."""
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    device = torch.device("cpu" if on_cpu else f"cuda:{os.environ['LOCAL_RANK']}")
    if not on_cpu:
        torch.cuda.set_device(device)
    store: dist.Store
    if STORE_VARIABLE in os.environ:  # not the ranks' file: torch removes it after the last rank
        file = f"{os.environ[STORE_VARIABLE]}.benchmark"
        os.close(os.open(file, os.O_CREAT | os.O_CLOEXEC, 0o600))
        store = dist.FileStore(file)
    else:
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    dist.init_process_group(
        "gloo" if on_cpu else "nccl",
        store=dist.PrefixStore("benchmark", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    return device


def _measure_tflops(width: int, device: torch.device) -> float:
    kind = torch.float32 if device.type == "cpu" else torch.bfloat16
    left = torch.randn(width, width, device=device, dtype=kind)
    times = [_time_work(lambda: torch.mm(left, left), device) for _ in range(_ROUNDS + 1)]
    return 2 * width**3 / statistics.median(times[1:]) / 1e12


def _measure_bandwidth(size: int, device: torch.device) -> float:
    """Return the bus bandwidth of an all-reduce, in GB/s: the slowest rank's, on every rank.

    Each byte crosses the buses 2 (n - 1) / n times (nccl-tests, PERFORMANCE.md). All ranks call it.
    """
    world = dist.get_world_size()
    buffer = torch.zeros(size // 4, device=device)
    times = [_time_work(lambda: dist.all_reduce(buffer), device) for _ in range(_ROUNDS + 1)]
    longest = torch.tensor(statistics.median(times[1:]), dtype=torch.float64, device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return 2 * (world - 1) / world * size / float(longest) / 1e9


def _time_work(work: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    work()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
