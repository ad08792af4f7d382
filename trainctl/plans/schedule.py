"""Learning rate over the run, as a closed form of the step: nothing to save, nothing to replay.

Phases (warmup, decay) begin and end with a step: a length in tokens is rounded up to whole steps, a
fraction of the run to the nearest step. Between these points the curve is a function of a position
x(s): the number s of the update, from 0, or with `unit=tokens` the tokens of the updates before
it. Without a batch ramp the two are proportional and give the same curve. With a ramp, a curve in
tokens is slow in steps while the batches are small.

With W the position where the warmup ends, E = x(T - 1) the position of the last of T updates:

- warmup, x(s) < W:  x(s + 1) / W, with `warmup_from_zero` x(s) / W, times the shape's value at W
- after it, p = (x(s) - W) / (E - W), so that p is 0 right after the warmup and 1 at the last
  update; with `floor_after_end`, E = x(T)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from trainctl.config.schema import ScheduleConfig, ScheduleUnit
from trainctl.options.schedule import Course, WithDecay, schedule_position, spec_of, steps_of_share
from trainctl.plans.types import Batches, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve(Course):
    """Factor of the peak learning rate in each update of a run.

    After the warmup it is the shape of the schedule's kind (`trainctl.options.schedule`). Shapes
    that decay to the floor reach it exactly at update `end`. If no update is left to decay over,
    the peak is kept. Updates beyond the end keep the last value.
    """

    @classmethod
    def of(cls, plan: RunPlan) -> Curve:
        """Return the curve of a plan."""
        batches = plan.batches
        decay, _ = decay_length(plan.config.schedule, plan.total_steps, batches)
        return cls(
            config=plan.config.schedule,
            batches=batches,
            total_steps=plan.total_steps,
            warmup_steps=plan.warmup_steps,
            decay_steps=decay,
        )

    @property
    def stable_end(self) -> int | None:
        """Step whose checkpoint is kept so that a run can be extended; None if no decay follows."""
        has_decay = isinstance(self.config, WithDecay)
        return self.stable_steps if has_decay and self.stable_steps < self.total_steps else None

    @property
    def turns(self) -> tuple[int, ...]:
        """Numbers of the updates at which the curve jumps, as far as its formula says."""
        turns = spec_of(self.config).turns
        return () if turns is None else turns.at(self)

    def factor(self, step: int, *, drops: int = 0) -> float:
        """Return the factor of update number `step`, from 0; in [floor, 1] after the warmup.

        `drops` is the number of drops caused by the held-out loss so far, if the schedule follows
        it.
        """
        spec, course = spec_of(self.config), replace(self, drops=drops) if drops else self
        if step >= self.warmup_steps:
            return spec.shape(course, step)
        risen = self.position(self.risen_steps(step)) / self.position(self.warmup_steps)
        if spec.rise is not None:
            return spec.rise(course, risen)
        return spec.shape(course, self.warmup_steps) * risen


def warmup_length(schedule: ScheduleConfig, total_steps: int, batches: Batches) -> tuple[int, str]:
    """Return the optimizer steps of the warmup, and the reason."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps, "schedule.warmup_steps"
    if schedule.warmup_tokens is not None:
        steps = batches.steps_for(schedule.warmup_tokens)
        return steps, f"schedule.warmup_tokens {schedule.warmup_tokens:_}, rounded up to a step"
    share, position = schedule.warmup_fraction, partial(schedule_position, schedule, batches)
    return (
        steps_of_share(share, total_steps, position),
        f"schedule.warmup_fraction {share:g} x {_whole_length(schedule, total_steps, position)}",
    )


def decay_length(schedule: ScheduleConfig, total_steps: int, batches: Batches) -> tuple[int, str]:
    """Return the steps of the final decay (`wsd`), and the reason; 0 for kinds without one."""
    if not isinstance(schedule, WithDecay):
        return 0, f"schedule.kind={schedule.kind} has no decay of its own"
    if schedule.decay_steps is not None:
        return schedule.decay_steps, "schedule.decay_steps"

    def tokens_of_last(steps: int) -> int:
        return batches.tokens_before(total_steps) - batches.tokens_before(total_steps - steps)

    if schedule.decay_tokens is not None:
        steps = bisect_left(range(total_steps), schedule.decay_tokens, key=tokens_of_last)
        return steps, f"schedule.decay_tokens {schedule.decay_tokens:_}, rounded up to a step"
    share, position = schedule.decay_fraction, partial(schedule_position, schedule, batches)
    return (
        steps_of_share(
            share, total_steps, lambda steps: position(total_steps) - position(total_steps - steps)
        ),
        f"schedule.decay_fraction {share:g} x {_whole_length(schedule, total_steps, position)}",
    )


def _whole_length(
    schedule: ScheduleConfig, total_steps: int, position: Callable[[int], int]
) -> str:
    if schedule.unit is ScheduleUnit.steps:
        return f"total_steps {total_steps}"
    return f"{position(total_steps):_} tokens of the run"
