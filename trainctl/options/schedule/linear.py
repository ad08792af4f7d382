"""A straight line down to the floor: 1 - (1 - f) p."""

from __future__ import annotations

from trainctl.options.schedule import (
    TOTAL,
    WARMUP,
    Schedule,
    ScheduleForm,
    WithEnd,
    linear_decay,
    warmup_max_lr,
)

SPEC = Schedule(
    name="linear",
    keys=WithEnd,
    shape=linear_decay,
    floor=(0.0, "down to zero, arXiv:2502.15938"),
    # DeepSpeed's line ends at 0, like this one's default floor.
    deepspeed=ScheduleForm(
        type="WarmupDecayLR", parameters=(WARMUP, TOTAL, warmup_max_lr(default=1e-3))
    ),
)
