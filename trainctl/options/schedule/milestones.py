"""Drops by a factor at each of a list of milestones."""

from __future__ import annotations

from trainctl.options.schedule import (
    WHOLE_DROPS,
    Course,
    Schedule,
    ScheduleJumps,
    WithMilestones,
    milestone_steps,
)


def drops(course: Course) -> tuple[int, ...]:
    """Return the numbers of the updates at which the schedule drops."""
    return milestone_steps(course.config, course.total_steps, course.batches)


def shape(course: Course, step: int) -> float:
    """Return max(f, step_factor^n), with n the number of milestones at or before update s."""
    passed = sum(milestone <= step for milestone in drops(course))
    return float(max(course.floor, course.config.step_factor**passed))


SPEC = Schedule(
    name="milestones",
    keys=WithMilestones,
    shape=shape,
    floor=WHOLE_DROPS,
    turns=ScheduleJumps(at=drops, key="drop_steps", why="lower from the update after each"),
    in_unit=("milestones",),
)
