"""Warmup, stable, decay (WSD, arXiv:2405.18392): the peak until a final decay."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import cos, pi, sqrt

from trainctl.config.schema.option import option
from trainctl.options.schedule import Course, Schedule, WithDecay, interpolate_from


class DecayShape(Enum):
    """Shape of the final decay."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"


@dataclass
class WsdConfig(WithDecay):
    """Keys of WSD."""

    decay_shape: DecayShape = option(
        DecayShape.one_minus_sqrt, "Shape of the decay phase of `wsd`."
    )


def shape(course: Course, step: int) -> float:
    """Return 1, then f + (1 - f) g(q) from the last stable update S to the last update.

    q = (x(s) - x(S)) / (E - x(S)), and g(q) is 1 - q, (1 + cos(pi q)) / 2, or 1 - sqrt(q).
    """
    left = _remaining_share(
        course.config.decay_shape, course.progress(step, course.stable_steps - 1)
    )
    return interpolate_from(course.floor, left)


def _remaining_share(shape: DecayShape, progress: float) -> float:
    match shape:
        case DecayShape.linear:
            return 1 - progress
        case DecayShape.cosine:
            return (1 + cos(pi * progress)) / 2
        case DecayShape.one_minus_sqrt:
            return 1 - sqrt(progress)


SPEC = Schedule(
    name="wsd", keys=WsdConfig, shape=shape, floor=(0.0, "down to zero, arXiv:2405.18392")
)
