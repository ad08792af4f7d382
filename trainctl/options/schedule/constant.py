"""Constant at the peak: 1."""

from __future__ import annotations

from trainctl.config.schema import ScheduleConfig
from trainctl.options.schedule import WARMUP, Schedule, ScheduleForm, warmup_max_lr

SPEC = Schedule(
    name="constant",
    keys=ScheduleConfig,
    shape=lambda course, step: 1.0,
    floor=(1.0, "it is the peak"),
    is_flat=True,
    deepspeed=ScheduleForm(type="WarmupLR", parameters=(WARMUP, warmup_max_lr())),
)
