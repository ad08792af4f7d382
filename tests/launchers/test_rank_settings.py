"""Ranks that are measured before they train, and that run on processors of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from supervised import Launches

from trainctl.config.schema import Accelerator, CpuBinding
from trainctl.hardware.detect import (
    parse_list,
    processor_shares,
    processors_by_socket,
    rank_processors,
)
from trainctl.launchers.agent.benchmark import Speed, slow_ranks


@pytest.mark.slow
def test_a_benchmark_comes_first_and_the_ranks_train_then(launches: Launches) -> None:
    launch = launches.start("steps,gloo,processors", benchmark=True, cpu_binding=CpuBinding.cores)
    code, talk = launch.end(60)
    assert code == 0, talk
    (benchmark,) = launch.events("benchmark")
    assert benchmark["all_reduce_gb_per_second"] > 0
    assert [speed["rank"] for speed in benchmark["speeds"]] == [0, 1]
    assert all(speed["tflops"] > 0 and speed["host"] for speed in benchmark["speeds"])
    assert len(launch.events("step")) == 10
    for rank, share in enumerate(rank_processors(CpuBinding.cores, 2, Accelerator.cpu)):
        assert f"processors {sorted(share)}" in launch.run.attempt(1).rank_log(rank).read_text()


@pytest.mark.slow
def test_a_network_that_is_too_slow_is_refused(launches: Launches) -> None:
    launch = launches.start("steps", benchmark=True, min_bandwidth_gb_per_second=1e6)
    code, talk = launch.end(60)
    assert code == 4
    assert "GB/s, and launcher.min_bandwidth_gb_per_second=1e+06" in talk
    assert not launch.events("step")


def test_the_slow_are_named() -> None:
    speeds = [Speed(rank, "n", tflops) for rank, tflops in enumerate((400, 410, 300, 405))]
    assert [speed.rank for speed in slow_ranks(speeds)] == [2]
    assert not slow_ranks(speeds[:2])


def test_the_kernels_lists() -> None:
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_list("\n") == []


def make_machine(root: Path) -> None:
    """Two sockets of two cores of two threads, numbered as Intel's machines are."""
    for node, cpus in enumerate(("0-1,4-5", "2-3,6-7")):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus)
    for cpu in range(8):
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}")


def test_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    make_machine(tmp_path)
    sockets = processors_by_socket(set(range(8)), tmp_path)
    assert sockets == {0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}
    assert processors_by_socket({1, 5}, tmp_path) == {0: [1, 5]}
    assert processors_by_socket({3, 1}, tmp_path / "nothing") == {0: [1, 3]}


@pytest.mark.parametrize(
    ("homes", "expected"),
    [
        ([None] * 4, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ([None] * 2, [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ([1, 1, 0, 0], [[2, 6], [3, 7], [0, 4], [1, 5]]),
        ([1, 0], [[2, 6, 3, 7], [0, 4, 1, 5]]),
        ([0, None], [[0, 4, 1, 5], [2, 6, 3, 7]]),
        ([None] * 3, [[0, 4], [1, 5, 2], [6, 3, 7]]),
    ],
)
def test_each_rank_has_its_share(homes: list[int | None], expected: list[list[int]]) -> None:
    assert processor_shares({0: [0, 4, 1, 5], 1: [2, 6, 3, 7]}, homes) == expected


def test_more_ranks_than_processors_share_them() -> None:
    assert processor_shares({0: [3, 5]}, [None] * 4) == [[3], [3], [5], [5]]


def test_nothing_is_bound_unless_asked() -> None:
    assert rank_processors(CpuBinding.none, 4, Accelerator.cpu) == []
    bound = rank_processors(CpuBinding.cores, 2, Accelerator.cpu)
    assert {cpu for share in bound for cpu in share} <= os.sched_getaffinity(0)
