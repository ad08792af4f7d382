"""Specification of a learning rate schedule: its keys, and its curve in closed form.

A shape is a function of the `Course` of a run and of an update's number. It gives the factor of the
peak learning rate after the warmup. The formulas use p = (x - W) / (E - W), where x is the position
along the curve (the number of the update, from 0, or the tokens before it), W the position of the
warmup's end, E the position of the last update (with `floor_after_end` of the one after it) and f
the floor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from trainctl.config.registry import Spec, spec_lookup
from trainctl.config.schema import ScheduleConfig, ScheduleUnit
from trainctl.config.schema.option import option


@dataclass
class WithFloor(ScheduleConfig):
    """Keys of a schedule that decays to a floor."""

    floor_ratio: float | None = option(
        None,
        "Final, or lowest, learning rate as a fraction of the peak; none is the default of the "
        "kind, shown in the plan: 0.1 for cosine, 0 for step.",
        minimum=0,
        maximum=1,
    )


@dataclass
class WithEnd(WithFloor):
    """Keys of a schedule that reaches its floor at the end of the run."""

    floor_after_end: bool = option(
        False,
        "Reach the floor one step after the run, as transformers, GPT-NeoX and torchtitan do; by "
        "default the last update has it.",
    )


@dataclass
class WithDecay(WithEnd):
    """Keys of a schedule that stays at the peak until a final decay."""

    decay_steps: int | None = option(
        None,
        "Length of the decay phase of `wsd`; none derives it from decay_tokens or decay_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    decay_tokens: int | None = option(
        None,
        "Length of the decay phase of `wsd`, if decay_steps is none; rounded up to a whole step.",
        unit="tokens",
        minimum=0,
        needs=(lambda s: s.decay_steps is None, "schedule.decay_steps=null, which replaces it"),
    )
    decay_fraction: float = option(
        0.2,
        "Length of the decay phase of `wsd` as a fraction of the run, if neither decay_steps nor "
        "decay_tokens is set.",
        minimum=0,
        maximum=1,
        needs=(
            lambda s: s.decay_steps is None and s.decay_tokens is None,
            "schedule.decay_steps=null and decay_tokens=null, which replace it",
        ),
    )


@dataclass
class WithInterval(WithFloor):
    """Keys of a schedule that repeats."""

    step_every: int | None = option(
        None,
        "Interval between drops of `step`, period of `cyclic`, or first cycle of "
        "`cosine_restarts`.",
        unit="optimizer steps",
        minimum=1,
        needs=(lambda s: s.unit is ScheduleUnit.steps, "schedule.unit=steps"),
    )
    step_every_tokens: int | None = option(
        None,
        "Interval in tokens, in place of step_every; needs unit=tokens.",
        unit="tokens",
        minimum=1,
        needs=(lambda s: s.unit is ScheduleUnit.tokens, "schedule.unit=tokens"),
    )

    @property
    def interval(self) -> int:
        """Length of the interval in positions; rules make sure that it is set."""
        every = self.step_every if self.unit is ScheduleUnit.steps else self.step_every_tokens
        return every or 1


@dataclass
class WithDrops(WithFloor):
    """Keys of a schedule that drops by the same factor each time."""

    step_factor: float = option(
        0.1,
        "Factor applied to the learning rate at each interval of `step`, each milestone of "
        "`milestones`, and each drop of `plateau`.",
        above=0,
        maximum=1,
    )


@dataclass
class WithMilestones(WithDrops):
    """Keys of a schedule that drops at given milestones."""

    milestones: list[int] = option(
        [],
        "Points at which `milestones` drops the learning rate: updates since the start of the "
        "run, or tokens with unit=tokens; empty uses milestone_fractions.",
        example="[8000,9000]",
        unit="optimizer steps or tokens",
    )
    milestone_fractions: list[float] = option(
        [0.8, 0.9],
        "Milestones as fractions of the run, if milestones is empty.",
        example="[0.8,0.9]",
        needs=(lambda s: not s.milestones, "schedule.milestones empty, which replaces them"),
    )


@dataclass
class WithPatience(WithDrops):
    """Keys of a schedule that drops when the held-out loss has stopped falling for a while."""

    plateau_patience: int = option(
        3,
        "Number of consecutive evaluations without a lower held-out loss before `plateau` drops "
        "the learning rate.",
        unit="evaluations",
        minimum=1,
    )
    plateau_min_delta: float = option(
        0.0,
        "`plateau`: minimum decrease of the held-out loss that counts as an improvement.",
        unit="nats",
        minimum=0,
    )


class TokenCounter(Protocol):
    """Conversion between the steps and the tokens of a run."""

    def tokens_before(self, step: int) -> int:
        """Return the number of tokens in the updates before number `step`."""

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps from the start with at least `tokens` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The properties of a run on which a learning rate curve depends."""

    config: Any
    """The section, with the keys of its kind."""
    batches: TokenCounter
    """Conversion between steps and tokens."""
    total_steps: int
    """Updates of the whole run, T; 0 and 1 are allowed."""
    warmup_steps: int
    """Updates of the warmup."""
    decay_steps: int = 0
    """Updates of the final decay; 0 for kinds without one."""
    drops: int = 0
    """Drops so far, if the kind follows the held-out loss."""

    @property
    def floor(self) -> float:
        """f: the lowest factor, at which the curve may end."""
        return floor_ratio(self.config)[0]

    @property
    def stable_steps(self) -> int:
        """Number of updates before the final decay, warmup included.

        A longer run can resume from a checkpoint at or before this step as if the longer run had
        been planned from the start.
        """
        return max(self.warmup_steps, self.end - self.decay_steps) + 1

    @property
    def end(self) -> int:
        """Number of the update that has the floor: the last one, or the one after it."""
        is_after = isinstance(self.config, WithEnd) and self.config.floor_after_end
        return self.total_steps if is_after else max(0, self.total_steps - 1)

    def position(self, step: int) -> int:
        """Return x(s): the position along the curve before update number `step`."""
        return schedule_position(self.config, self.batches, step)

    def risen_steps(self, step: int) -> int:
        """Return how many steps of the warmup update number `step` has risen by."""
        return step if self.config.warmup_from_zero else step + 1

    def way(self, step: int) -> int:
        """Return x(s) - W: positions since the end of the warmup."""
        return self.position(step) - self.position(self.warmup_steps)

    def progress(self, step: int, start: int | None = None) -> float:
        """Return 0 before update number `start`, 1 before `end`; 0 if nothing lies between.

        Args:
            start: None means the first update after the warmup.
        """
        first = self.position(self.warmup_steps if start is None else start)
        last = self.position(self.end)
        if last <= first:
            return 0.0
        return min(1.0, max(0.0, (self.position(step) - first) / (last - first)))


Shape = Callable[[Course, int], float]
"""Returns the factor of update number `step`, from 0, after the warmup; in [floor, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleJumps:
    """The updates at which a curve jumps by its formula."""

    at: Callable[[Course], tuple[int, ...]]
    """Function that returns the numbers of the updates, from 0, before which the curve jumps."""
    key: str
    """Key that lists them in the plan."""
    why: str
    """Explanation of these updates in the plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleParameter:
    """One parameter of DeepSpeed's `scheduler.params`, and trainctl's equivalent key."""

    name: str
    key: str
    """Key of trainctl, with its section."""
    default: float | None = None
    """Default of DeepSpeed's class (runtime/lr_schedules.py); None if it has none."""
    is_whole: bool = False
    """Whether it is an integer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleForm:
    """A schedule in DeepSpeed's JSON. It is only read: trainctl's trainer sets the learning rate
    itself.
    """

    type: str
    """Value of `scheduler.type`."""
    parameters: tuple[ScheduleParameter, ...]
    """Parameters with an equivalent key, in the order of trainctl's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Spec):
    """Specification of one learning rate schedule."""

    shape: Shape
    """The curve after the warmup."""
    floor: tuple[float, str]
    """Default of `floor_ratio`, with the reason."""
    rise: Callable[[Course, float], float] | None = None
    """Function that returns the factor during the warmup from the share of it that has passed. None
    rises linearly from 0 to the start of the shape.
    """
    turns: ScheduleJumps | None = None
    """Updates at which the curve jumps; None if it does not."""
    is_flat: bool = False
    """Whether it stays at the peak after the warmup."""
    why_not_zero: str = ""
    """Reason why its floor cannot be 0; empty if it can."""
    in_unit: tuple[str, ...] = ()
    """Keys whose numbers are counted in `unit`."""
    deepspeed: ScheduleForm | None = None
    """Form in DeepSpeed's JSON; None if DeepSpeed has no such schedule."""


spec_of = spec_lookup(ScheduleConfig, Schedule)
"""Return the specification of the configured schedule."""


def floor_ratio(section: ScheduleConfig) -> tuple[float, str]:
    """Return the floor over the peak, and its origin or reason."""
    if isinstance(section, WithFloor) and section.floor_ratio is not None:
        return section.floor_ratio, "schedule.floor_ratio"
    floor, why = spec_of(section).floor
    return floor, f"schedule.kind={section.kind}, {why}"


def schedule_position(section: ScheduleConfig, batches: TokenCounter, step: int) -> int:
    """Return x(s): the number of an update, or the tokens before it."""
    return step if section.unit is ScheduleUnit.steps else batches.tokens_before(step)


def steps_of_share(share: float, total_steps: int, length: Callable[[int], int]) -> int:
    """Return the number of steps that comes nearest to a share of the run.

    Args:
        length: Function that returns the length of the first n steps, in steps or tokens.
    """
    wanted = share * length(total_steps)
    steps = bisect_left(range(total_steps), wanted, key=length)
    is_nearer = steps > 0 and wanted - length(steps - 1) < length(steps) - wanted
    return steps - 1 if is_nearer else steps


def milestone_steps(
    section: WithMilestones, total_steps: int, batches: TokenCounter
) -> tuple[int, ...]:
    """Return the numbers of the updates, from 0, at which the schedule drops.

    A milestone in tokens is the first update after that number of tokens.
    """
    if section.milestones and section.unit is ScheduleUnit.tokens:
        return tuple(batches.steps_for(tokens) for tokens in section.milestones)
    if section.milestones:
        return tuple(section.milestones)
    position = partial(schedule_position, section, batches)
    return tuple(
        steps_of_share(share, total_steps, position) for share in section.milestone_fractions
    )


def interpolate_from(low: float, share: float) -> float:
    """Return `low` at share 0, 1 at share 1, linear between; exact at both ends."""
    return low * (1 - share) + share


def linear_decay(course: Course, step: int) -> float:
    """Return 1 - (1 - f) p."""
    return interpolate_from(course.floor, 1 - course.progress(step))


WHOLE_DROPS = (0.0, "no floor, so every drop is whole")

WARMUP = ScheduleParameter(
    name="warmup_num_steps", key="schedule.warmup_steps", default=1000, is_whole=True
)
TOTAL = ScheduleParameter(name="total_num_steps", key="training.steps", is_whole=True)


def warmup_max_lr(default: float | None = None) -> ScheduleParameter:
    """Return the parameter of the peak learning rate, whose default may be the optimizer's."""
    return ScheduleParameter(name="warmup_max_lr", key="optimizer.lr", default=default)
