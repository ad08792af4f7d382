"""Ceilings of a device and its host: products, copies, launches, Python."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def measure(*, is_small: bool) -> dict[str, float]:
    """Measure the ceilings of this machine: the first GPU, or without one its CPU.

    Args:
        is_small: Whether to use sizes for a smoke test.

    Returns:
        `tflops` of a bf16 product (fp32 on a CPU), `copy_gb_per_second` of a copy on the device,
        read and written bytes together, `to_device_gb_per_second` from pinned memory,
        `launch_us`, the host's time for one kernel in a queue, and `python_us`, the time of a
        thousand calls of a Python function.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    edge, count, repeats = (256, 2**20, 2) if is_small else (8192, 2**29, 10)
    low = torch.bfloat16 if on_gpu else torch.float32
    a = torch.randn(edge, edge, device=device, dtype=low)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    host = torch.ones(count // 4, pin_memory=on_gpu)
    tiny = torch.zeros(1, device=device)
    launches = 100 if is_small else 10_000
    return {
        "tflops": 2 * edge**3 / _best(lambda: a @ a, repeats) / 1e12,
        "copy_gb_per_second": 8 * count / _best(lambda: target.copy_(source), repeats) / 1e9,
        "to_device_gb_per_second": count
        / _best(lambda: host.to(device, non_blocking=True, copy=True), repeats)
        / 1e9,
        "launch_us": _launch_seconds(tiny, launches) * 1e6,
        "python_us": _best(_call_python, repeats) * 1e6,
    }


def _best(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the fastest of several executions, after two that warm up."""
    work(), work()
    times = []
    for _ in range(repeats):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        times.append(time.perf_counter() - began)
    return min(times)


def _launch_seconds(tensor: torch.Tensor, launches: int) -> float:
    """Return the seconds of a launch where the host does nothing else."""
    tensor.add_(1)
    _wait()
    began = time.perf_counter()
    for _ in range(launches):
        tensor.add_(1)
    _wait()
    return (time.perf_counter() - began) / launches


def _call_python() -> None:
    for number in range(1000):
        _one_call(number)


def _one_call(number: int) -> int:
    return number + 1


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
