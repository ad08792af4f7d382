"""Detection of what slows a run down while it goes on: ranks that the others wait for, the
network, and the disk of checkpoints.

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

Ranks of one pipeline stage do the same work and are compared with each other; two are enough.

Two more are no rank's own work, and are compared with the same attempt's best:

- `communication`, on a CPU: the least time of all ranks in which one waited for peers within a
  step. The last rank to arrive in a collective waits for the transfer alone.
- `checkpoint`: seconds a byte in which ranks write and read their files. A rank is compared with
  the others too.
"""

from __future__ import annotations

import math
import socket
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.engines.process import Process
from trainctl.engines.stopwatch import Stopwatch
from trainctl.options.callbacks import Callback, Context
from trainctl.plans.types import Batch, RunPlan
from trainctl.train.callbacks.context import Journal, StepState

PARTS = ("data", "forward", "backward", "optimizer")
WINDOW_STEPS = 10
"""Steps whose mean is compared, so that a pause of one step names no rank."""
WINDOWS = 3
"""Windows in a row until a rank is called slow, and until it is no longer."""
LEAST_SHARE = 0.05
"""Least delay behind the peers, as a share of the step: a smaller delay is not felt."""
CHECKPOINTS = 2
"""Checkpoints in a row, written or read, until a disk is called slow."""
LEAST_CHECKPOINT_SECONDS = 1.0
"""Least delay of a checkpoint: below it, files are too small to judge a disk by."""
STEP, COMMUNICATION, CHECKPOINT = "step", "communication", "checkpoint"
_SENT = (*PARTS, COMMUNICATION)
"""Times that ranks exchange."""

Subject = tuple[int | None, str]
"""Rank that may be slow, or None for all, and one of the three above."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Delay of a rank behind the typical rank of its pipeline stage, or of all ranks."""

    rank: int | None
    """Global rank; None for all."""
    factor: float
    """Own time of the rank, divided by the typical time."""
    part: str
    """Part of a step (of `PARTS`) in which the rank loses most, `COMMUNICATION` or `CHECKPOINT`."""
    seconds: float
    """Seconds of this part of a step, or of the checkpoint."""
    usual_seconds: float
    """Typical seconds of the peers, or the least of the attempt."""

    @property
    def subject(self) -> Subject:
        return self.rank, STEP if self.part in PARTS else self.part


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


def slow_disks(
    seconds: Sequence[float], sizes: Sequence[int], *, factor: float
) -> tuple[list[Slowness], float]:
    """Return the ranks whose disk is slower than the others', and the typical seconds a byte.

    Ranks with less than half the bytes of the largest are left out. The typical rate is the lower
    median, and nan without bytes.

    Args:
        seconds: Time in which each rank wrote or read its files.
        sizes: Bytes of these files.
    """
    ranks = [rank for rank, size in enumerate(sizes) if size and size >= max(sizes) / 2]
    if not ranks:
        return [], math.nan
    rate = statistics.median_low(seconds[rank] / sizes[rank] for rank in ranks)
    found = []
    for rank in ranks:
        usual = rate * sizes[rank]
        if seconds[rank] > factor * usual and seconds[rank] - usual > LEAST_CHECKPOINT_SECONDS:
            found.append(Slowness(rank, seconds[rank] / usual, CHECKPOINT, seconds[rank], usual))
    return found, rate


class Stragglers:
    """This rank's own times, and on the first rank the stragglers found.

    No collective is added: the times are sent with the sums that ranks form after every step.

    Args:
        plan: The plan; `launcher.straggler_factor` may switch it off.
        process: This rank. All ranks construct theirs at the same point.
        read: Seconds and bytes of the checkpoint's files that this rank has read; zeros without a
            resume.
    """

    def __init__(self, plan: RunPlan, process: Process, read: tuple[float, int] = (0.0, 0)) -> None:
        self._factor = plan.config.launcher.straggler_factor
        mesh, stage = plan.mesh, plan.config.zero_stage.stage
        self._stages = mesh.pipeline
        # A stage of a single rank has nobody to be compared with.
        self._is_on = self._factor is not None and process.world_size > mesh.pipeline
        self._forward_is_own = stage < 3 and mesh.tensor == mesh.sequence_parts == 1
        self._rank, self._world_size = process.rank, process.world_size
        told = process.gather((socket.gethostname(), read)) if self._is_on else []
        self._hosts = [host for host, _ in told]
        self.reads = [read for _, read in told]
        """What each rank has read of the checkpoint."""
        self._ranks_per_node = max(1, process.world_size // plan.hardware.nodes)
        self._own: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._step_seconds = 0.0
        self._batch: Batch | None = None
        self._least: dict[str, float] = {}
        self._in_a_row: defaultdict[Subject, int] = defaultdict(int)
        self._named: dict[Subject, str] = {}

    def add(
        self,
        step_seconds: float,
        seconds: Mapping[str, float],
        busy: Mapping[str, float],
        waited: float,
        batch: Batch | None,
    ) -> None:
        """Add the times of a step.

        Args:
            seconds: Seconds of each part.
            busy: Seconds of each part without sleep, on a CPU; empty elsewhere.
            waited: Seconds of waiting for peers, on a CPU; 0 elsewhere.
            batch: The step's batch. With another one, collectives are measured anew.
        """
        if batch != self._batch:
            self._batch = batch
            self._least.pop(COMMUNICATION, None)
        self._steps += 1
        self._step_seconds += step_seconds
        own = {**busy, "data": seconds.get("data", 0.0)}
        if self._forward_is_own:
            own["forward"] = seconds.get("forward", 0.0)
        own[COMMUNICATION] = waited
        for part in _SENT:
            self._own[part] += own.get(part, 0.0)

    def window(self) -> list[float]:
        """Return this rank's times at the end of a window, to be summed over the ranks.

        Each rank has its own places in the list, whose length is the same on all ranks. Before the
        end of a window the list is empty.
        """
        if not self._is_on or self._steps < WINDOW_STEPS:
            return []
        values = [0.0] * (self._world_size * len(_SENT))
        place = self._rank * len(_SENT)
        values[place : place + len(_SENT)] = [self._own[part] / self._steps for part in _SENT]
        return values

    def judge(self, sums: Sequence[float], step: int) -> list[dict[str, Any]]:
        """Close a window; on the first rank, return records of what became slow or caught up.

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
        places = range(0, len(sums), len(_SENT))
        times = [sums[place : place + len(_SENT)] for place in places]
        own, waits = [of_rank[:-1] for of_rank in times], [of_rank[-1] for of_rank in times]
        slow = slow_ranks(own, stages=self._stages, factor=self._factor, step_seconds=step_seconds)
        subjects: list[Subject] = [(rank, STEP) for rank in range(self._world_size)]
        # Where the last rank is late, the others' data has arrived before it, and it waits less.
        if not slow:
            subjects.append((None, COMMUNICATION))
            waited = min(waits)
            least = self._best(COMMUNICATION, waited)
            # By how much the step is longer, so that short collectives may vary.
            if step_seconds > self._factor * (step_seconds - (waited - least)):
                factor = waited / least if least > 0 else math.inf
                slow.append(Slowness(None, factor, COMMUNICATION, waited, least))
        return self._records(slow, subjects, step, WINDOWS)

    def judge_disk(
        self, files: Sequence[tuple[float, int]], step: int, *, reading: bool = False
    ) -> list[dict[str, Any]]:
        """Return records of disks that became slow or caught up; on the first rank.

        Args:
            files: Seconds and bytes of each rank's files of a checkpoint; empty without one.
            reading: Whether they were read, not written.
        """
        if not self._is_on or self._rank != 0:
            return []
        assert self._factor is not None
        seconds, sizes = [each[0] for each in files], [each[1] for each in files]
        slow, rate = slow_disks(seconds, sizes, factor=self._factor)
        if math.isnan(rate):
            return []
        largest = max(sizes)
        now, least = rate * largest, self._best(f"{CHECKPOINT}/{reading}", rate) * largest
        if now > self._factor * least and now - least > LEAST_CHECKPOINT_SECONDS:
            slow.append(Slowness(None, now / least, CHECKPOINT, now, least))
        subjects = [(rank, CHECKPOINT) for rank in (*range(self._world_size), None)]
        return self._records(slow, subjects, step, CHECKPOINTS)

    def _best(self, name: str, value: float) -> float:
        """Return the least value of the attempt so far, with this one."""
        self._least[name] = min(value, self._least.get(name, value))
        return self._least[name]

    def _records(
        self, slow: Sequence[Slowness], subjects: Sequence[Subject], step: int, needed: int
    ) -> list[dict[str, Any]]:
        """Count a look at the subjects; return records of those whose state changes."""
        by_subject = {found.subject: found for found in slow}
        records = []
        for subject in subjects:
            found = by_subject.get(subject)
            if (found is not None) == (subject in self._named):
                self._in_a_row.pop(subject, None)
                continue
            self._in_a_row[subject] += 1
            if self._in_a_row[subject] < needed:
                continue
            del self._in_a_row[subject]
            record = {"slow": found is not None, "step": step, **self._place(subject[0])}
            if found is not None:
                self._named[subject] = found.part
                record |= asdict(found)
            else:
                record["part"] = self._named.pop(subject)
            records.append(record)
        return records

    def _place(self, rank: int | None) -> dict[str, Any]:
        if rank is None:
            return {"rank": None, "node": None, "host": None}
        return {"rank": rank, "node": rank // self._ranks_per_node, "host": self._hosts[rank]}


class StragglerRecords(Callback):
    """Records what becomes slow and what catches up."""

    def __init__(
        self, stragglers: Stragglers, times: Stopwatch, now: StepState, journal: Journal
    ) -> None:
        self._stragglers, self._times = stragglers, times
        self._now, self._journal = now, journal

    def on_train_start(self, context: Context) -> None:
        self._record(
            self._stragglers.judge_disk(self._stragglers.reads, context.step, reading=True)
        )

    def after_step(self, context: Context) -> None:
        now, times = self._now, self._times
        batch = now.made.batch if now.made is not None else None
        self._stragglers.add(
            now.step_seconds, now.seconds, times.take_busy(), times.take_waited(), batch
        )

    def before_agreement(self, context: Context) -> Sequence[float]:
        return self._stragglers.window()

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        self._record(self._stragglers.judge(sums, context.step))
        for files in self._now.written:
            self._record(self._stragglers.judge_disk(files, context.step))
        self._now.written.clear()

    def _record(self, found: Sequence[Mapping[str, Any]]) -> None:
        for fields in found:
            self._journal.record("straggler", **fields)
