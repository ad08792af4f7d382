"""Half a cosine down to the floor (arXiv:1608.03983, eq. 5, one cycle)."""

from __future__ import annotations

from math import cos, pi

from trainctl.options.schedule import (
    TOTAL,
    WARMUP,
    Course,
    Schedule,
    ScheduleForm,
    ScheduleParameter,
    WithEnd,
    interpolate_from,
    warmup_max_lr,
)


def shape(course: Course, step: int) -> float:
    """Return f + (1 - f) (1 + cos(pi p)) / 2."""
    return interpolate_from(course.floor, (1 + cos(pi * course.progress(step))) / 2)


SPEC = Schedule(
    name="cosine",
    keys=WithEnd,
    shape=shape,
    floor=(0.1, "to a tenth, as in the GPT-3 and Llama papers"),
    deepspeed=ScheduleForm(
        type="WarmupCosineLR",
        parameters=(
            WARMUP,
            TOTAL,
            ScheduleParameter(name="cos_min_ratio", key="schedule.floor_ratio", default=1e-4),
            warmup_max_lr(),
        ),
    ),
)
