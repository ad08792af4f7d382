"""Records of steps in which torch compiled blocks anew, as for a batch of another shape.

Each time costs seconds to minutes, in which all ranks wait. After a number of shapes torch gives
up, and runs further ones uncompiled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.engines.process import Process
from trainctl.options.callbacks import Callback, Context
from trainctl.train.callbacks.context import Journal, StepState
from trainctl.train.session import Session

WARMUP_STEPS = 2
"""Steps of an attempt that compile what training needs; the first evaluation compiles its own."""
STEP, AFTER_STEP = "step", "after_step"


@dataclass(frozen=True, slots=True)
class Compiled:
    """Compilations of a rank since the last look."""

    graphs: int
    """Functions, or parts of them between graph breaks, that it compiled or refused."""
    seconds: float
    reason: str | None
    """Difference to the graph compiled last, in torch's words; None if there was none."""
    is_refused: bool
    """Whether torch has reached its limit: it runs such calls uncompiled from now on."""


class CompilerWatch:
    """Reader of torch's counts of compilations; a look costs the reading of a number."""

    def __init__(self) -> None:
        from torch._dynamo import utils  # all of the compiler: a second of a start

        self._utils = utils
        self._tried = self._count()

    def _count(self) -> int:
        return self._utils.counters["frames"]["total"]

    def take(self) -> Compiled | None:
        """Return what was compiled since the last call; None if nothing was."""
        before, self._tried = self._tried, self._count()
        if self._tried <= before:
            return None
        # torch keeps the newest 64; backward graphs have entries of their own.
        entries = self._utils.get_compilation_metrics()
        forward = [n for n, each in enumerate(entries) if each.is_forward or each.fail_type]
        forward = forward[before - self._tried :]
        reasons = [entries[n].recompile_reason for n in forward if entries[n].recompile_reason]
        newest = entries[forward[0] :] if forward else []
        return Compiled(
            graphs=self._tried - before,
            seconds=sum(each.duration_us or 0 for each in newest) / 1e6,
            # After the number of the cached graph that was compared.
            reason=reasons[0].partition(": ")[2].strip() or reasons[0] if reasons else None,
            is_refused=any("limit" in (each.fail_reason or "") for each in newest),
        )


class Recompilations(Callback):
    """Callback that records what any rank compiles after its warmup.

    All ranks learn of it by the agreement that follows every step.
    """

    def __init__(self, process: Process, now: StepState, journal: Journal) -> None:
        self._process, self._now, self._journal = process, now, journal
        self._watch = CompilerWatch()
        self._found: dict[str, Compiled] = {}
        self._steps, self._times = 0, 0
        self._has_evaluated = False
        self._shapes: deque[list[int]] = deque(maxlen=2)

    def on_train_start(self, context: Context) -> None:
        self._watch.take()

    def after_step(self, context: Context) -> None:
        self._steps += 1
        made = self._now.made
        assert made is not None
        self._shapes.append([made.batch.micro_batch_size, made.batch.sequence_length])
        self._look(STEP)

    def on_evaluate(self, context: Context) -> None:
        self._look(AFTER_STEP, is_warmup=not self._has_evaluated)
        self._has_evaluated = True

    def before_agreement(self, context: Context) -> Sequence[float]:
        self._look(AFTER_STEP)
        return [len(self._found)]

    def after_agreement(self, context: Context, sums: Sequence[float]) -> None:
        if not sums[0]:
            return
        by_rank = self._process.gather({part: asdict(each) for part, each in self._found.items()})
        self._found.clear()
        self._times += 1
        for part in (STEP, AFTER_STEP):
            ranks = [rank for rank, found in enumerate(by_rank) if part in found]
            if ranks:
                self._record(part, ranks, [by_rank[rank][part] for rank in ranks])

    def _look(self, part: str, *, is_warmup: bool = False) -> None:
        found = self._watch.take()
        is_warmup = is_warmup or self._steps <= WARMUP_STEPS
        if found is not None and (found.is_refused or not is_warmup):
            self._found[part] = found

    def _record(self, part: str, ranks: list[int], found: list[dict[str, Any]]) -> None:
        # Of a resume that only ends the last step, no step is made.
        before, now = (self._shapes[0], self._shapes[-1]) if self._shapes else (None, None)
        self._journal.record(
            "recompilation",
            step=self._now.step,
            part=part,
            ranks=ranks,
            graphs=max(each["graphs"] for each in found),
            seconds=max(each["seconds"] for each in found),
            reason=next((each["reason"] for each in found if each["reason"]), None),
            shape=now if part == STEP else None,
            shape_before=before if part == STEP and before != now else None,
            gave_up=any(each["is_refused"] for each in found),
            times=self._times,
        )


def recompilations_of(session: Session, now: StepState, journal: Journal) -> Recompilations | None:
    """Build the callback of a run; None if it compiles nothing."""
    is_compiled = session.plan.config.kernels.is_compiled
    return Recompilations(session.process, now, journal) if is_compiled else None
