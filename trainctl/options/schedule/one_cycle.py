"""One cycle (arXiv:1708.07120): a line from the floor to the peak over the warmup, then a line
back.
"""

from __future__ import annotations

from trainctl.options.schedule import Schedule, WithEnd, interpolate_from, linear_decay

SPEC = Schedule(
    name="one_cycle",
    keys=WithEnd,
    shape=linear_decay,
    floor=(0.01, "from a hundredth and back"),
    rise=lambda course, risen: interpolate_from(course.floor, risen),
)
