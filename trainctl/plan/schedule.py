"""The learning rate over the run, as closed forms of the step: nothing to save, nothing to replay.

One rule for steps and tokens. Phases (warmup, decay) begin and end with a step: a length in tokens
is rounded up to whole steps, a share of the run to the nearest one. Between these points the curve
is a function of a position x(s): the number s of the update, from 0, or with `unit=tokens` the
tokens of the updates before it. Without a batch ramp the two are proportional and every curve is
the same; with one, tokens make a curve slow in steps while the batches are small.

With W the position where the warmup ends, E = x(T - 1) that of the last of T updates, f the floor:

- warmup, x(s) < W:  x(s + 1) / W, times the shape's value at W
- after it, p = (x(s) - W) / (E - W), so that p is 0 right after the warmup and 1 at the last update
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import cos, pi, sqrt

from trainctl.config.schema import DecayShape, ScheduleConfig, ScheduleKind, ScheduleUnit
from trainctl.plan.batches import Batches
from trainctl.plan.types import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What the peak learning rate is multiplied by in each update of a run.

    After the warmup (see the module for x, W, E, p and f):

    - constant: 1
    - linear: 1 - (1 - f) p
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2                 (arXiv:1608.03983, eq. 5, one cycle)
    - polynomial: f + (1 - f) (1 - p)^power
    - exponential: f^p
    - wsd: 1, then f + (1 - f) g(q) from the last stable update S to the last one, with
      q = (x(s) - x(S)) / (E - x(S)); g is 1 - q, its cosine, or 1 - sqrt(q)  (arXiv:2405.18392)
    - step: max(f, step_factor^floor((x(s) - W) / interval))
    - milestones: max(f, step_factor^n), n of the milestones being at or before update s
    - inverse_sqrt: max(f, sqrt(W / x(s + 1))); the warmup ends at 1 (arXiv:1706.03762, eq. 3)
    - one_cycle: from f up to 1 over the warmup, then back to f, linear    (arXiv:1708.07120)
    - cyclic: a triangle from f up to 1 and back, again and again           (arXiv:1506.01186)
    - cosine_restarts: f + (1 - f) (1 + cos(pi t / T)) / 2, t the way since the last restart; the
      first cycle has the length T of the interval, each later one restart_factor times that of
      the one before; it begins at 1, and the next one where t is T        (arXiv:1608.03983, eq. 5)
    - plateau: max(f, step_factor^n) after n drops, which follow the held-out loss, not the step

    The shapes that decay to the floor reach it exactly at update T - 1. Where no update is left to
    decay over, the peak is kept. Updates beyond the end keep the last value.

    Attributes:
        config: The schedule group.
        batches: Sizes of every step.
        total_steps: Updates of the whole run, T; 0 and 1 are allowed.
        warmup_steps: Updates of the warmup.
        decay_steps: Updates of the decay of `wsd`; 0 for the other kinds.
    """

    config: ScheduleConfig
    batches: Batches
    total_steps: int
    warmup_steps: int
    decay_steps: int = 0

    @classmethod
    def of(cls, plan: RunPlan) -> Curve:
        """That of a plan."""
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
    def stable_steps(self) -> int:
        """Updates that are made before the decay of `wsd` begins, warmup included.

        A checkpoint after at most so many can go on in a longer run as if that had been planned.
        """
        return max(self.warmup_steps, self.total_steps - 1 - self.decay_steps) + 1

    @property
    def stable_end(self) -> int | None:
        """The step whose checkpoint is kept, to be extended; None where no decay follows."""
        is_wsd = self.config.kind is ScheduleKind.wsd
        return self.stable_steps if is_wsd and self.stable_steps < self.total_steps else None

    def position(self, step: int) -> int:
        """x(s): what the curve is a function of, before update number `step`."""
        return _position(self.config, self.batches, step)

    def factor(self, step: int, *, drops: int = 0) -> float:
        """Of update number `step`, from 0; in [floor, 1] after the warmup.

        Args:
            step: The update's number.
            drops: Of `plateau`, so far.
        """
        if step >= self.warmup_steps:
            return self._shape(step, drops)
        risen = self.position(step + 1) / self.position(self.warmup_steps)
        match self.config.kind:
            case ScheduleKind.one_cycle:
                return _between(self.floor, risen)
            case ScheduleKind.inverse_sqrt:
                return risen
            case _:
                return self._shape(self.warmup_steps, drops) * risen

    def _shape(self, step: int, drops: int) -> float:
        """The factor after the warmup."""
        config, low = self.config, self.floor
        position, warmup = self.position(step), self.position(self.warmup_steps)
        end = self.position(max(0, self.total_steps - 1))
        progress = _progress(position, warmup, end)
        match config.kind:
            case ScheduleKind.constant:
                return 1.0
            case ScheduleKind.linear | ScheduleKind.one_cycle:
                return _between(low, 1 - progress)
            case ScheduleKind.cosine:
                return _between(low, (1 + cos(pi * progress)) / 2)
            case ScheduleKind.polynomial:
                return _between(low, (1 - progress) ** config.power)
            case ScheduleKind.exponential:
                return float(low**progress)
            case ScheduleKind.wsd:
                start = self.position(self.stable_steps - 1)
                return _between(low, _decay(config.decay_shape, _progress(position, start, end)))
            case ScheduleKind.step:
                return max(low, config.step_factor ** ((position - warmup) // self._interval))
            case ScheduleKind.milestones:
                passed = sum(milestone <= step for milestone in self.milestones)
                return max(low, config.step_factor**passed)
            case ScheduleKind.plateau:
                return max(low, config.step_factor**drops)
            case ScheduleKind.cosine_restarts:
                since, length = self._cycle(position - warmup)
                return _between(low, (1 + cos(pi * since / length)) / 2)
            case ScheduleKind.inverse_sqrt:
                return max(low, sqrt(max(warmup, self.position(1)) / self.position(step + 1)))
            case ScheduleKind.cyclic:
                phase = (position - warmup) % self._interval / self._interval
                return _between(low, 1 - abs(2 * phase - 1))

    @property
    def floor(self) -> float:
        """f: what the curve ends at, or never falls below."""
        return floor_ratio(self.config)[0]

    @property
    def milestones(self) -> tuple[int, ...]:
        """Numbers of the updates that `milestones` drops at; empty for the other kinds."""
        return milestone_steps(self.config, self.total_steps, self.batches)

    @property
    def turns(self) -> tuple[int, ...]:
        """Numbers of the updates before which the curve jumps, as far as its formula says."""
        return self.milestones + self.restarts

    @property
    def restarts(self) -> tuple[int, ...]:
        """Numbers of the updates that begin a cycle of `cosine_restarts`, without the first."""
        if self.config.kind is not ScheduleKind.cosine_restarts:
            return ()
        warmup, last = self.position(self.warmup_steps), self.position(self.total_steps - 1)
        starts, begin, length = [], warmup + self._interval, self._interval
        while begin <= last:
            starts.append(bisect_left(range(self.total_steps), begin, key=self.position))
            length *= self.config.restart_factor
            begin += length
        return tuple(dict.fromkeys(starts))

    def _cycle(self, way: int) -> tuple[int, int]:
        """How far into its cycle a position after the warmup is, and the cycle's length."""
        length, factor = self._interval, self.config.restart_factor
        if factor == 1:
            return way % length, length
        while way >= length:
            way, length = way - length, length * factor
        return way, length

    @property
    def _interval(self) -> int:
        """Of what repeats, in positions; the rules see to it that there is one."""
        config = self.config
        every = config.step_every if config.unit is ScheduleUnit.steps else config.step_every_tokens
        return every or 1


PERIODIC = (ScheduleKind.step, ScheduleKind.cyclic, ScheduleKind.cosine_restarts)
"""Kinds that need an interval."""

OWN_FLOORS: dict[ScheduleKind, tuple[float, str]] = {
    ScheduleKind.constant: (1.0, "it is the peak"),
    ScheduleKind.linear: (0.0, "down to zero, arXiv:2502.15938"),
    ScheduleKind.cosine: (0.1, "to a tenth, as in the GPT-3 and Llama papers"),
    ScheduleKind.wsd: (0.0, "down to zero, arXiv:2405.18392"),
    ScheduleKind.polynomial: (0.1, "to a tenth"),
    ScheduleKind.exponential: (0.1, "to a tenth: it never reaches zero"),
    ScheduleKind.step: (0.0, "no floor, so every drop is whole"),
    ScheduleKind.milestones: (0.0, "no floor, so every drop is whole"),
    ScheduleKind.inverse_sqrt: (0.0, "no floor, arXiv:1706.03762"),
    ScheduleKind.one_cycle: (0.01, "from a hundredth and back"),
    ScheduleKind.cyclic: (0.1, "from a tenth and back"),
    ScheduleKind.cosine_restarts: (0.0, "down to zero before each restart, arXiv:1608.03983"),
    ScheduleKind.plateau: (0.0, "no floor, so every drop is whole"),
}
"""What a kind's `floor_ratio` is where nobody asks for another, and why."""


def floor_ratio(schedule: ScheduleConfig) -> tuple[float, str]:
    """The floor over the peak, and why."""
    if schedule.floor_ratio is not None and schedule.kind is not ScheduleKind.constant:
        return schedule.floor_ratio, "schedule.floor_ratio"
    floor, why = OWN_FLOORS[schedule.kind]
    return floor, f"schedule.kind={schedule.kind.value}, {why}"


def milestone_steps(
    schedule: ScheduleConfig, total_steps: int, batches: Batches
) -> tuple[int, ...]:
    """Numbers of the updates, from 0, at which `milestones` drops; empty for the other kinds.

    One in tokens is the first update that comes after so many.
    """
    if schedule.kind is not ScheduleKind.milestones:
        return ()
    if schedule.milestones and schedule.unit is ScheduleUnit.tokens:
        return tuple(batches.steps_for(tokens) for tokens in schedule.milestones)
    if schedule.milestones:
        return tuple(schedule.milestones)
    position = partial(_position, schedule, batches)
    return tuple(
        _steps_of_share(share, total_steps, position) for share in schedule.milestone_fractions
    )


def warmup_length(schedule: ScheduleConfig, total_steps: int, batches: Batches) -> tuple[int, str]:
    """Optimizer steps of the warmup, and why."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps, "schedule.warmup_steps"
    if schedule.warmup_tokens is not None:
        steps = batches.steps_for(schedule.warmup_tokens)
        return steps, f"schedule.warmup_tokens {schedule.warmup_tokens:_}, rounded up to a step"
    share, position = schedule.warmup_fraction, partial(_position, schedule, batches)
    return (
        _steps_of_share(share, total_steps, position),
        f"schedule.warmup_fraction {share:g} x {_whole(schedule, total_steps, position)}",
    )


def decay_length(schedule: ScheduleConfig, total_steps: int, batches: Batches) -> tuple[int, str]:
    """Optimizer steps of the decay of `wsd`, and why; 0 for the other kinds."""
    if schedule.kind is not ScheduleKind.wsd:
        return 0, "only schedule.kind=wsd has a decay of its own"
    if schedule.decay_steps is not None:
        return schedule.decay_steps, "schedule.decay_steps"

    def tokens_of_last(steps: int) -> int:
        return batches.tokens_before(total_steps) - batches.tokens_before(total_steps - steps)

    if schedule.decay_tokens is not None:
        steps = bisect_left(range(total_steps), schedule.decay_tokens, key=tokens_of_last)
        return steps, f"schedule.decay_tokens {schedule.decay_tokens:_}, rounded up to a step"
    share, position = schedule.decay_fraction, partial(_position, schedule, batches)
    return (
        _steps_of_share(
            share, total_steps, lambda steps: position(total_steps) - position(total_steps - steps)
        ),
        f"schedule.decay_fraction {share:g} x {_whole(schedule, total_steps, position)}",
    )


def _position(schedule: ScheduleConfig, batches: Batches, step: int) -> int:
    return step if schedule.unit is ScheduleUnit.steps else batches.tokens_before(step)


def _steps_of_share(share: float, total_steps: int, length: Callable[[int], int]) -> int:
    """The number of steps whose length is nearest a share of all steps' length."""
    wanted = share * length(total_steps)
    steps = bisect_left(range(total_steps), wanted, key=length)
    is_nearer = steps > 0 and wanted - length(steps - 1) < length(steps) - wanted
    return steps - 1 if is_nearer else steps


def _whole(schedule: ScheduleConfig, total_steps: int, position: Callable[[int], int]) -> str:
    if schedule.unit is ScheduleUnit.steps:
        return f"total_steps {total_steps}"
    return f"{position(total_steps):_} tokens of the run"


def _progress(position: int, start: int, last: int) -> float:
    """0 at `start`, 1 at `last` and after it; 0 when there is nothing in between."""
    return min(1.0, max(0.0, (position - start) / (last - start))) if last > start else 0.0


def _between(low: float, share: float) -> float:
    """`low` at share 0, 1 at share 1; exact at both ends."""
    return low * (1 - share) + share


def _decay(shape: DecayShape, progress: float) -> float:
    match shape:
        case DecayShape.linear:
            return 1 - progress
        case DecayShape.cosine:
            return (1 + cos(pi * progress)) / 2
        case DecayShape.one_minus_sqrt:
            return 1 - sqrt(progress)
