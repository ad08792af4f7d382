"""Detection of stragglers, ranks that the others wait for, while a run goes on.

All ranks end a step together, so the length of a step names no rank. What tells is the time that a
rank spends on its own work, without waiting for others:

- `data`: the host's clock. It includes only waiting for the rank's own prefetch thread.
- `forward`, if it contains no collective (ZeRO below 3, no tensor or sequence parallelism): the
  clock of the device.
- On a CPU, any other `forward`, `backward` and `optimizer`: the time that the main thread was busy,
  because it sleeps in a collective. Sleep outside collectives counts as busy, and so does the time
  while the process was stopped.

On a device a collective is a kernel, which is as busy while it waits as while it moves data. So
there `backward` and `optimizer` name no rank, nor does a `forward` with collectives.

Ranks of one pipeline stage do the same work and are compared with each other.
"""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.engines.process import Process
from trainctl.engines.stopwatch import Stopwatch
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.types import RunPlan
from trainctl.train.callbacks.context import Journal, StepState

PARTS = ("data", "forward", "backward", "optimizer")
WINDOW_STEPS = 10
"""Steps whose mean is compared, so that a pause of one step names no rank."""
WINDOWS = 3
"""Windows in a row until a rank is called slow, and until it is no longer."""
LEAST_SHARE = 0.05
"""Least delay behind the peers, as a share of the step: a smaller delay is not felt."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Delay of a rank behind the typical rank of its pipeline stage."""

    rank: int
    """Global rank."""
    factor: float
    """Own time of the rank, divided by the typical time."""
    part: str
    """Part of a step (of `PARTS`) in which the rank loses most."""
    seconds: float
    """Own seconds of the rank in this part of a step."""
    usual_seconds: float
    """Typical seconds of the stage's ranks in this part."""


def slow_ranks(
    own: Sequence[Sequence[float]], *, stages: int, factor: float, step_seconds: float
) -> list[Slowness]:
    """Return the ranks whose own time is more than `factor` times the typical time of their stage.

    The typical time is the lower median of the stage: of two ranks, the time of the faster one. If
    all ranks are slow, none is returned, nor is a rank without peers.

    Args:
        own: Seconds of each of `PARTS` in a step, by rank; the ranks of a stage follow each other.
        factor: Ratio above which a rank is slow.
        step_seconds: Length of a step.
    """
    size = len(own) // stages
    found = []
    for first in range(0, len(own), size):
        ranks = range(first, first + size)
        stage = [own[rank] for rank in ranks]
        usual = statistics.median_low(sum(parts) for parts in stage)
        of_parts = [statistics.median_low(part) for part in zip(*stage, strict=True)]
        for rank in ranks:
            total = sum(own[rank])
            if total > factor * usual and total - usual > LEAST_SHARE * step_seconds:
                lost = [mine - theirs for mine, theirs in zip(own[rank], of_parts, strict=True)]
                worst = lost.index(max(lost))
                found.append(
                    Slowness(
                        rank=rank,
                        factor=total / usual if usual > 0 else float("inf"),
                        part=PARTS[worst],
                        seconds=own[rank][worst],
                        usual_seconds=of_parts[worst],
                    )
                )
    return found


class Stragglers:
    """This rank's own times, and on the first rank the stragglers found.

    No collective is added: the times are sent with the sums that ranks form after every step.

    Args:
        plan: The plan; `launcher.straggler_factor` may switch it off.
        process: This rank. All ranks construct theirs at the same point.
    """

    def __init__(self, plan: RunPlan, process: Process) -> None:
        self._factor = plan.config.launcher.straggler_factor
        mesh, stage = plan.mesh, plan.config.zero_stage.stage
        self._stages = mesh.pipeline
        # A stage of a single rank has nobody to be compared with.
        self._is_on = self._factor is not None and process.world_size > mesh.pipeline
        self._forward_is_own = stage < 3 and mesh.tensor == mesh.sequence == 1
        self._rank, self._world_size = process.rank, process.world_size
        self._hosts = process.gather(socket.gethostname()) if self._is_on else []
        self._ranks_per_node = max(1, process.world_size // plan.hardware.nodes)
        self._own: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._step_seconds = 0.0
        self._in_a_row: defaultdict[int, int] = defaultdict(int)
        self._named: set[int] = set()

    def add(
        self, step_seconds: float, seconds: Mapping[str, float], busy: Mapping[str, float]
    ) -> None:
        """Add the times of a step.

        Args:
            seconds: Seconds of each part.
            busy: Seconds of each part without sleep, on a CPU; empty elsewhere.
        """
        self._steps += 1
        self._step_seconds += step_seconds
        own = {**busy, "data": seconds.get("data", 0.0)}
        if self._forward_is_own:
            own["forward"] = seconds.get("forward", 0.0)
        for part in PARTS:
            self._own[part] += own.get(part, 0.0)

    def window(self) -> list[float]:
        """Return this rank's times at the end of a window, to be summed over the ranks.

        Each rank has its own places in the list, whose length is the same on all ranks. Before the
        end of a window the list is empty.
        """
        if not self._is_on or self._steps < WINDOW_STEPS:
            return []
        values = [0.0] * (self._world_size * len(PARTS))
        place = self._rank * len(PARTS)
        values[place : place + len(PARTS)] = [self._own[part] / self._steps for part in PARTS]
        return values

    def judge(self, sums: Sequence[float], step: int) -> list[dict[str, Any]]:
        """Close a window; on the first rank, return records of ranks that became slow or caught up.

        Args:
            sums: Result of `window`, summed over the ranks; empty before the end of a window.
            step: Optimizer steps done.
        """
        if not sums:
            return []
        assert self._factor is not None
        step_seconds = self._step_seconds / self._steps
        self._own.clear()
        self._steps, self._step_seconds = 0, 0.0
        if self._rank != 0:
            return []
        places = range(0, len(sums), len(PARTS))
        own = [sums[place : place + len(PARTS)] for place in places]
        slow = {
            found.rank: found
            for found in slow_ranks(
                own, stages=self._stages, factor=self._factor, step_seconds=step_seconds
            )
        }
        return [
            {"slow": rank in slow, "step": step, **self._place(rank), **self._account(slow, rank)}
            for rank in range(self._world_size)
            if self._changes(rank, is_slow=rank in slow)
        ]

    def _changes(self, rank: int, *, is_slow: bool) -> bool:
        """Count a window; return True if the rank's change to slow, or back, is to be recorded."""
        if is_slow == (rank in self._named):
            self._in_a_row.pop(rank, None)
            return False
        self._in_a_row[rank] += 1
        if self._in_a_row[rank] < WINDOWS:
            return False
        del self._in_a_row[rank]
        self._named ^= {rank}
        return True

    def _place(self, rank: int) -> dict[str, Any]:
        return {"rank": rank, "node": rank // self._ranks_per_node, "host": self._hosts[rank]}

    @staticmethod
    def _account(slow: Mapping[int, Slowness], rank: int) -> dict[str, Any]:
        return asdict(slow[rank]) if rank in slow else {}


class StragglerRecords(Callback):
    """Records ranks that become slow and ranks that catch up."""

    def __init__(
        self, stragglers: Stragglers, times: Stopwatch, now: StepState, journal: Journal
    ) -> None:
        self._stragglers, self._times = stragglers, times
        self._now, self._journal = now, journal

    def after_step(self, context: Context) -> None:
        busy = self._times.take_busy()
        self._stragglers.add(self._now.step_seconds, self._now.seconds, busy)

    def before_agreement(self, context: Context) -> Sequence[float]:
        return self._stragglers.window()

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        for found in self._stragglers.judge(sums, context.step):
            self._journal.record("straggler", **found)
