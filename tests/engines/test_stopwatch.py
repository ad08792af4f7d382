"""Tests of phase times on the host's clock, and on a device's clock without waiting for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from trainctl.engines import stopwatch
from trainctl.engines.stopwatch import Stopwatch, busy_seconds


def test_parts_add_up_until_they_are_taken() -> None:
    times = Stopwatch(torch.device("cpu"))
    before = time.perf_counter()
    for _ in range(3):
        with times.part("forward"):
            time.sleep(0.01)
        with times.host_part("data"):
            time.sleep(0.005)
    elapsed = time.perf_counter() - before
    taken = times.take()
    assert list(taken) == ["forward", "data"]
    assert taken["forward"] >= 0.03 and taken["data"] >= 0.015
    assert sum(taken.values()) <= elapsed
    assert times.take() == {}


def test_a_part_that_fails_is_counted() -> None:
    times = Stopwatch(torch.device("cpu"))
    with pytest.raises(ValueError), times.part("forward"):
        raise ValueError
    assert "forward" in times.take()


def test_waiting_for_a_processor_is_busy_and_sleep_is_not() -> None:
    """Peers of a rank whose processor is used by something else must see it as slow."""
    mine = os.sched_getaffinity(0)
    one = min(mine)
    greedy = f"import os\nos.sched_setaffinity(0, {{{one}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", greedy], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None and other.stdout.readline()
            os.sched_setaffinity(0, {one})
            began = busy_seconds(), time.thread_time(), time.perf_counter()
            while time.perf_counter() < began[2] + 0.5:
                pass
            busy, computed = busy_seconds() - began[0], time.thread_time() - began[1]
            elapsed = time.perf_counter() - began[2]
        finally:
            os.sched_setaffinity(0, mine)
            other.kill()
    assert computed < 0.8 * elapsed
    assert busy == pytest.approx(elapsed, rel=0.1)
    times = Stopwatch(torch.device("cpu"))
    with times.part("backward"):
        time.sleep(0.3)
    assert times.take()["backward"] - times.take_busy()["backward"] >= 0.25
    assert times.take_busy() == {}


def test_sleep_that_is_no_wait_for_peers_is_busy_once_it_is_watched() -> None:
    times = Stopwatch(torch.device("cpu"))
    collective: dict[str, Any] = {}
    wait = "import time\ndef all_reduce(): time.sleep(0.6)"
    exec(compile(wait, "/site-packages/torch/distributed/c10d.py", "exec"), collective)
    with times.watch_stalls(), times.step():
        with times.part("backward"):
            collective["all_reduce"]()
        collective["all_reduce"]()  # the gradients' norm
        with times.part("optimizer"):
            time.sleep(0.6)
        with times.host_part("data"):
            time.sleep(0.5)
    assert 1.1 < times.take_waited() < 1.6 and times.take_waited() == 0
    busy = times.take_busy()
    assert busy["backward"] < 0.2 and 0.4 < busy["optimizer"] < 0.7
    assert set(busy) == {"backward", "optimizer"}


STOPPED = """
import os, subprocess, sys, torch
from trainctl.engines.stopwatch import Stopwatch
times = Stopwatch(torch.device("cpu"))
wait = "import time\\ndef all_reduce(): time.sleep(2.5)"
collective = {}
exec(compile(wait, "/site-packages/torch/distributed/c10d.py", "exec"), collective)
with times.watch_stalls(), times.part("backward"):
    program = f"sleep 0.3; kill -STOP {os.getpid()}; sleep 1.6; kill -CONT {os.getpid()}"
    subprocess.Popen(["sh", "-c", program])
    collective["all_reduce"]()
print(times.take_busy()["backward"])
"""


def test_the_time_in_which_a_process_is_stopped_is_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True)
    assert 1.4 < float(done.stdout) < 2.3, done.stderr


class Device:
    """A device that is as far as it is told: it numbers its work, and passes events in order."""

    def __init__(self) -> None:
        self.given = 0
        self.done = 0
        self.made = 0

    def event(self, *, enable_timing: bool) -> DeviceEvent:
        assert enable_timing
        self.made += 1
        return DeviceEvent(self)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1

    def record(self) -> None:
        self.device.given += 1
        self.at = self.device.given

    def query(self) -> bool:
        return self.at <= self.device.done

    def elapsed_time(self, end: DeviceEvent) -> float:
        """Milliseconds: one between events that follow each other."""
        assert self.query() and end.query()
        return float(end.at - self.at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(stopwatch.torch.cuda, "Event", made.event)
    yield made


def test_what_a_device_has_not_reached_counts_later_and_once(device: Device) -> None:
    times = Stopwatch(torch.device("cuda"))
    for name in ("forward", "backward", "optimizer"):
        with times.part(name):
            pass
    device.done = 4  # in the middle of the update
    assert times.take() == {"forward": 0.001, "backward": 0.001}
    with times.part("forward"):
        pass
    device.done = device.given
    assert times.take() == {"optimizer": 0.001, "forward": 0.001}
    assert times.take() == {}


def test_events_are_used_again(device: Device) -> None:
    times = Stopwatch(torch.device("cuda"))
    for _ in range(100):
        with times.part("forward"):
            pass
        device.done = device.given
        times.take()
    assert device.made == 2


@pytest.mark.gpu
def test_device_time_is_the_time_of_its_kernels() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    times = Stopwatch(device)
    for _ in range(2):  # the first loads the kernels
        torch.cuda.synchronize()
        times.take()
        started = time.perf_counter()
        with times.part("forward"):
            for _ in range(20):
                matrix @ matrix
        queued = time.perf_counter() - started
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - started
    taken = times.take()["forward"]
    assert queued < taken <= elapsed
