"""Where time goes: on the host's clock, and on a device's without waiting for it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

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
    """A rank whose processor something else uses is slow for its peers."""
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
def test_a_device_s_time_is_that_of_its_work() -> None:
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
