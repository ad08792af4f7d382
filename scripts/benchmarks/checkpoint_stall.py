"""Time that a save blocks the training loop: asynchronous saves compared with synchronous ones.

Both write the same state, sync it and commit it by the protocol of every save; they differ in which
thread waits. Between saves the loop multiplies matrices, so that the writing thread competes with
it for the CPU, and the next save starts only after the previous one was committed. The first save
of each kind allocates its buffers and is left out. Target: a ratio of at most 0.1.

    python scripts/benchmarks/checkpoint_stall.py [--gigabytes 1 2 4] [--saves 3] [--folder DIR]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainctl.config.schema import CheckpointConfig
from trainctl.engines.process import Process
from trainctl.engines.shards import Fragment
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.train.checkpoint.optimizer_state import MASTER
from trainctl.train.checkpoint.save import Saver

STATES = ("exp_avg", "exp_avg_sq")
TENSORS = 8


class AdamState:
    """State of a rank under Adam without an engine: weights and two moments in fp32."""

    is_swapped = False

    def __init__(self, num_bytes: int) -> None:
        numel = num_bytes // (4 * TENSORS * (1 + len(STATES)))
        self.fragments = [
            Fragment(f"parameter.{index}", 0, numel, index, 0, owned=True)
            for index in range(TENSORS)
        ]
        self._tensors = [
            {name: torch.rand(numel) for name in (MASTER, *STATES)} for _ in range(TENSORS)
        ]

    @property
    def num_bytes(self) -> int:
        return sum(item.nbytes for states in self._tensors for item in states.values())

    def state_names(self) -> list[str]:
        return list(STATES)

    def scalars(self) -> dict[str, float]:
        return {"step": 1.0}

    def numel(self, index: int) -> int:
        return self._tensors[index][MASTER].numel()

    def tensor(self, index: int, name: str) -> torch.Tensor:
        return self._tensors[index][name]

    def swapped_in(self, index: int) -> torch.no_grad:
        return torch.no_grad()


def stalls(
    folder: Path, process: Process, state: AdamState, *, asynchronous: bool, saves: int
) -> tuple[list[float], list[float]]:
    """Return the seconds that the loop was blocked in each save, and the seconds until its
    commit.
    """
    run = RunPaths(folder)
    config = CheckpointConfig(keep=1, asynchronous=asynchronous)
    saver = Saver(run, process, state, config)  # type: ignore[arg-type]
    blocked, whole = [], []
    product = torch.rand(512, 512)
    for step in range(1, saves + 2):
        started = time.monotonic()
        saver.save({"step": step, "samples": 0, "tokens": 0, "metrics": {}, "shapes": {}})
        stalled = time.monotonic() - started
        while not (saved := saver.take_saved()):
            product = torch.nn.functional.normalize(product @ product)  # the loop continues here
            assert not saver.has_failed
        saver.wait()
        assert [info.step for info in checkpoints.list_checkpoints(run)] == [step]
        if step > 1:
            blocked.append(stalled)
            whole.append(saved[0].seconds)
    shutil.rmtree(folder)
    return blocked, whole


def one_process() -> Process:
    """Return this process as the only rank."""
    timeout = timedelta(minutes=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    return Process(0, 1, torch.device("cpu"), dist.new_group(backend="gloo"), timeout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="checkpoint-stall-", dir=arguments.folder))
    process = one_process()
    print("state GB  sync s  async: blocked s  until committed s  blocked, async / sync")
    try:
        for gigabytes in arguments.gigabytes:
            needed = 2 * gigabytes * 1e9  # the checkpoint that is kept and the one being written
            memory = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if shutil.disk_usage(root).free < 1.1 * needed or memory < needed:
                print(f"{gigabytes:8.1f}  skipped: too little memory or disk is free")
                continue
            state = AdamState(int(gigabytes * 1e9))
            size, saves = state.num_bytes / 1e9, arguments.saves
            sync, _ = stalls(root / "sync", process, state, asynchronous=False, saves=saves)
            behind, committed = stalls(
                root / "async", process, state, asynchronous=True, saves=saves
            )
            blocked = statistics.median(behind)
            waited = statistics.median(sync)
            print(
                f"{size:8.2f}  {waited:6.2f}  {blocked:16.3f}  {statistics.median(committed):17.2f}"
                f"  {blocked / waited:21.3f}",
                flush=True,
            )
    finally:
        shutil.rmtree(root, ignore_errors=True)
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
