"""Ranks of real gloo groups that hang: `hanging_ranks.py FOLDER` starts those of every case.

Each case is a folder of an attempt, with `pids.json` once its ranks are at the collective that does
not end. The process ends with its ranks, which the test kills.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainctl.engines.flight_recorder import answer_requests, write_failed_record
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import die_with_parent
from trainctl.runs.status import Heartbeat, Phase

TIMEOUT = timedelta(seconds=60)
Group = dist.ProcessGroup


def average(group: Group, size: int = 4) -> None:
    dist.all_reduce(torch.ones(size), group=group)


def busy() -> None:
    time.sleep(60)


def skips(rank: int, data: Group, others: Group) -> None:
    """Go on with the next collective of the group without the all-reduce of the others."""
    if rank != 1:
        average(data)
    dist.broadcast(torch.ones(2, 3), 0, group=data)


def sleeps(rank: int, data: Group, others: Group) -> None:
    if rank == 1:
        busy()
    average(data)


def waits(rank: int, data: Group, others: Group) -> None:
    """Rank 0 waits for rank 1, which waits in another group for rank 2, which sleeps."""
    if rank == 2:
        busy()
    average(data if rank == 0 else others)


def another_shape(rank: int, data: Group, others: Group) -> None:
    """Call it with half the elements on rank 1, which gloo answers by an abort there."""
    average(data, 1000 if rank == 0 else 500)


def dead(rank: int, data: Group, others: Group) -> None:
    """Wait for a rank that the test stops; it sleeps until then."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    average(data)


CASES: dict[str, tuple[Callable[[int, Group, Group], None], int]] = {
    "skips": (skips, 3),
    "sleeps": (sleeps, 2),
    "waits": (waits, 3),
    "another_shape": (another_shape, 2),
    "dead": (dead, 2),
}
"""Behaviour of a rank after two steps together, and the number of ranks."""


def be_rank(case: str, attempt: AttemptPaths, rank: int) -> None:
    die_with_parent()
    run, world_size = CASES[case]
    with attempt.rank_log(rank).open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    path = attempt.flight_record(rank)
    answer_requests(path, attempt.flight_request)
    heartbeat = Heartbeat(attempt.heartbeat(rank))
    store = f"file://{attempt.root}/store"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    data = dist.new_group(group_desc="data", timeout=TIMEOUT)
    others = dist.new_group(list(range(1, world_size)), timeout=TIMEOUT)
    for step in range(2):
        average(data)
        heartbeat.beat(Phase.step, step + 1)
    (attempt.root / f"rank-{rank}").touch()
    try:
        run(rank, data, others)
    except RuntimeError as error:
        write_failed_record(path, error)
        raise


def main() -> None:
    die_with_parent()
    torch.set_num_threads(1)
    by_case: dict[str, dict[int, int]] = {}
    for case, (_, world_size) in CASES.items():
        attempt = AttemptPaths(Path(sys.argv[1]) / case, 1)
        attempt.logs.mkdir(parents=True)
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                be_rank(case, attempt, rank)
                os._exit(0)
            by_case.setdefault(case, {})[rank] = pid
    for case, pids in by_case.items():
        folder = Path(sys.argv[1]) / case
        while not all((folder / f"rank-{rank}").exists() for rank in pids):
            time.sleep(0.01)
        (folder / "pids.tmp").write_text(json.dumps(pids))
        (folder / "pids.tmp").rename(folder / "pids.json")
    for pids in by_case.values():
        for pid in pids.values():
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
