"""What a schedule says of itself: its keys, and its curve as a closed form of the update's number.

A shape is a function of the `Course` of a run and of an update: what the peak learning rate is
multiplied by after the warmup. With x the position that the curve goes along (the number of the
update, from 0, or the tokens before it), W that of the warmup's end, E that of the last update and
f the floor, each unit writes its own with p = (x - W) / (E - W).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from trainctl.config.registry import Spec, load
from trainctl.config.schema import ScheduleConfig, ScheduleUnit
from trainctl.config.schema.option import option


@dataclass
class WithFloor(ScheduleConfig):
    """Of what falls, or rises and falls."""

    floor_ratio: float | None = option(
        None,
        "Final, or lowest, learning rate over the peak; none is the kind's own, which the plan "
        "shows: a tenth for cosine, 0 for step.",
        minimum=0,
        maximum=1,
    )


@dataclass
class WithDecay(WithFloor):
    """Of what stays at the peak until a last phase."""

    decay_steps: int | None = option(
        None,
        "Length of the decay of `wsd`; none derives it from decay_tokens or decay_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    decay_tokens: int | None = option(
        None,
        "Length of the decay of `wsd`, if decay_steps is none; rounded up to a whole step.",
        unit="tokens",
        minimum=0,
        needs=(lambda s: s.decay_steps is None, "schedule.decay_steps=null, which replaces it"),
    )
    decay_fraction: float = option(
        0.2,
        "Share of the run that `wsd` decays over, if neither is given.",
        minimum=0,
        maximum=1,
        needs=(
            lambda s: s.decay_steps is None and s.decay_tokens is None,
            "schedule.decay_steps=null and decay_tokens=null, which replace it",
        ),
    )


@dataclass
class WithInterval(WithFloor):
    """Of what does the same again and again."""

    step_every: int | None = option(
        None,
        "Interval of `step`, period of `cyclic`, first cycle of `cosine_restarts`.",
        unit="optimizer steps",
        minimum=1,
        needs=(lambda s: s.unit is ScheduleUnit.steps, "schedule.unit=steps"),
    )
    step_every_tokens: int | None = option(
        None,
        "The same in tokens, in place of step_every; needs unit=tokens.",
        unit="tokens",
        minimum=1,
        needs=(lambda s: s.unit is ScheduleUnit.tokens, "schedule.unit=tokens"),
    )

    @property
    def interval(self) -> int:
        """In positions; the rules see to it that there is one."""
        every = self.step_every if self.unit is ScheduleUnit.steps else self.step_every_tokens
        return every or 1


@dataclass
class WithDrops(WithFloor):
    """Of what is multiplied by the same factor at each drop."""

    step_factor: float = option(
        0.1,
        "Factor of `step` at each interval, of `milestones` at each of them, of `plateau` at each "
        "drop.",
        above=0,
        maximum=1,
    )


@dataclass
class WithMilestones(WithDrops):
    """Of what drops where it is told to."""

    milestones: list[int] = option(
        [],
        "Where `milestones` drops: numbers of updates since the start of the run, or tokens with "
        "unit=tokens; empty takes milestone_fractions.",
        example="[8000,9000]",
    )
    milestone_fractions: list[float] = option(
        [0.8, 0.9],
        "The same as shares of the run, if milestones is empty.",
        example="[0.8,0.9]",
        needs=(lambda s: not s.milestones, "schedule.milestones empty, which replaces them"),
    )


@dataclass
class WithPatience(WithDrops):
    """Of what drops when the held-out loss has not become lower for a while."""

    plateau_patience: int = option(
        3,
        "`plateau` drops after so many evaluations in a row without a lower held-out loss.",
        unit="evaluations",
        minimum=1,
    )
    plateau_min_delta: float = option(
        0.0,
        "plateau_patience: how much lower the held-out loss has to be to count; less does not.",
        unit="nats",
        minimum=0,
    )


class Counted(Protocol):
    """How steps and tokens go together in a run."""

    def tokens_before(self, step: int) -> int:
        """Tokens of the updates before number `step`."""

    def steps_for(self, tokens: int) -> int:
        """Return the smallest number of steps from the start that have at least so many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The run that a schedule is for, as far as a curve depends on it."""

    config: Any
    """The section, with the keys of its kind."""
    batches: Counted
    """Steps and tokens, and how they go together in it."""
    total_steps: int
    """Updates of the whole run, T; 0 and 1 are allowed."""
    warmup_steps: int
    """Updates of the warmup."""
    decay_steps: int = 0
    """Updates of the last phase; 0 for kinds without one."""
    drops: int = 0
    """Drops that the held-out loss has brought so far, where the kind follows it."""

    @property
    def floor(self) -> float:
        """f: what the curve ends at, or never falls below."""
        return floor_ratio(self.config)[0]

    @property
    def stable_steps(self) -> int:
        """Updates that are made before the last phase begins, warmup included.

        A checkpoint after at most so many can go on in a longer run as if that had been planned.
        """
        return max(self.warmup_steps, self.total_steps - 1 - self.decay_steps) + 1

    def position(self, step: int) -> int:
        """x(s): what the curve is a function of, before update number `step`."""
        return position_of(self.config, self.batches, step)

    def way(self, step: int) -> int:
        """x(s) - W: positions since the end of the warmup."""
        return self.position(step) - self.position(self.warmup_steps)

    def progress(self, step: int, start: int | None = None) -> float:
        """0 before update number `start`, 1 before the last; 0 if there is nothing in between.

        Args:
            start: None is the first after the warmup.
        """
        first = self.position(self.warmup_steps if start is None else start)
        last = self.position(max(0, self.total_steps - 1))
        if last <= first:
            return 0.0
        return min(1.0, max(0.0, (self.position(step) - first) / (last - first)))


Shape = Callable[[Course, int], float]
"""The factor of update number `step`, from 0, after the warmup; in [floor, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleTurns:
    """Where a curve jumps, as far as its formula says."""

    at: Callable[[Course], tuple[int, ...]]
    """Numbers of the updates, from 0, before which it does."""
    key: str
    """Key of the plan that lists them."""
    why: str
    """What is so in each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleParameter:
    """One parameter of DeepSpeed's `scheduler.params`, and the key of ours that says the same."""

    name: str
    """Name in DeepSpeed's JSON."""
    key: str
    """Key of ours, with its section."""
    default: float | None = None
    """Default of DeepSpeed's class (runtime/lr_schedules.py); None where it has none."""
    is_whole: bool = False
    """Whether it is a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleForm:
    """A schedule as DeepSpeed's JSON names it: it is read, and trainctl's trainer has its own."""

    type: str
    """Name as it is written."""
    parameters: tuple[ScheduleParameter, ...]
    """Those that we have a key for, in the order of ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(Spec):
    """What one kind of schedule is, and what the plan says of it."""

    shape: Shape
    """The curve after the warmup."""
    floor: tuple[float, str]
    """What `floor_ratio` is where nobody asks for another, and why."""
    rise: Callable[[Course, float], float] | None = None
    """The factor in the warmup, of the share of it that has passed; None goes straight up from 0 to
    where the shape begins."""
    turns: ScheduleTurns | None = None
    """Where it jumps, if it does."""
    is_flat: bool = False
    """Whether it stays at the peak after the warmup."""
    why_not_zero: str = ""
    """Why its floor cannot be 0; empty if it can."""
    in_unit: tuple[str, ...] = ()
    """Keys whose numbers are counted in `unit`."""
    deepspeed: ScheduleForm | None = None
    """Form in DeepSpeed's JSON; None if that has no such schedule."""


def spec_of(section: ScheduleConfig) -> Schedule:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("schedule", section.kind)
    assert isinstance(spec, Schedule)
    return spec


def floor_ratio(section: ScheduleConfig) -> tuple[float, str]:
    """Return the floor over the peak, and why."""
    if isinstance(section, WithFloor) and section.floor_ratio is not None:
        return section.floor_ratio, "schedule.floor_ratio"
    floor, why = spec_of(section).floor
    return floor, f"schedule.kind={section.kind}, {why}"


def position_of(section: ScheduleConfig, batches: Counted, step: int) -> int:
    """x(s): the number of an update, or the tokens before it."""
    return step if section.unit is ScheduleUnit.steps else batches.tokens_before(step)


def steps_of_share(share: float, total_steps: int, length: Callable[[int], int]) -> int:
    """Return the number of steps whose length is nearest a share of all steps' length."""
    wanted = share * length(total_steps)
    steps = bisect_left(range(total_steps), wanted, key=length)
    is_nearer = steps > 0 and wanted - length(steps - 1) < length(steps) - wanted
    return steps - 1 if is_nearer else steps


def milestone_steps(section: WithMilestones, total_steps: int, batches: Counted) -> tuple[int, ...]:
    """Numbers of the updates, from 0, at which it drops.

    One in tokens is the first update that comes after so many.
    """
    if section.milestones and section.unit is ScheduleUnit.tokens:
        return tuple(batches.steps_for(tokens) for tokens in section.milestones)
    if section.milestones:
        return tuple(section.milestones)
    position = partial(position_of, section, batches)
    return tuple(
        steps_of_share(share, total_steps, position) for share in section.milestone_fractions
    )


def between(low: float, share: float) -> float:
    """`low` at share 0, 1 at share 1; exact at both ends."""
    return low * (1 - share) + share


def straight_down(course: Course, step: int) -> float:
    """1 - (1 - f) p."""
    return between(course.floor, 1 - course.progress(step))


WHOLE_DROPS = (0.0, "no floor, so every drop is whole")

WARMUP = ScheduleParameter(
    name="warmup_num_steps", key="schedule.warmup_steps", default=1000, is_whole=True
)
TOTAL = ScheduleParameter(name="total_num_steps", key="training.steps", is_whole=True)


def warmup_max_lr(default: float | None = None) -> ScheduleParameter:
    """Return the peak, which may be the optimizer's."""
    return ScheduleParameter(name="warmup_max_lr", key="optimizer.lr", default=default)
