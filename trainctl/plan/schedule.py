"""The learning rate over the run, as closed forms of the step: nothing to save, nothing to replay.

With s the number of the update (0-based), W the warmup, T the total, f the floor ratio:

- warmup, s < W:  (s + 1) / W, times the shape's own start
- after it, p = (s - W) / (T - 1 - W), so that p is 0 right after the warmup and 1 at the last step
"""

from __future__ import annotations

from math import cos, floor, pi, sqrt

from trainctl.config.schema import DecayShape, ScheduleConfig, ScheduleKind


def learning_rate_factor(
    schedule: ScheduleConfig, step: int, *, total_steps: int, warmup_steps: int
) -> float:
    """What the peak learning rate is multiplied by in update number `step`.

    After the warmup (see the module for s, W, T, f and p):

    - constant: 1
    - linear: 1 - (1 - f) p
    - cosine: f + (1 - f) (1 + cos(pi p)) / 2                 (arXiv:1608.03983, eq. 5, one cycle)
    - polynomial: f + (1 - f) (1 - p)^power
    - exponential: f^p
    - wsd: 1, then f + (1 - f) g(q) over the last D = decay_fraction T steps with
      q = (s - (T - 1 - D)) / D; g is 1 - q, its cosine, or 1 - sqrt(q)    (arXiv:2405.18392)
    - step: max(f, step_factor^floor((s - W) / step_every))
    - inverse_sqrt: max(f, sqrt(W / (s + 1)))           (arXiv:1706.03762, eq. 3, peak at 1)
    - one_cycle: from f up to 1 in the middle and back, linear             (arXiv:1708.07120)
    - cyclic: the same triangle again and again, of period step_every      (arXiv:1506.01186)

    The shapes that decay to the floor reach it exactly at step T - 1. Where no step is left to
    decay over (T - 1 <= W), the peak is kept. Steps beyond the end keep the last value.

    Args:
        schedule: The schedule group.
        step: Number of the update, from 0.
        total_steps: Updates of the whole run; 0 and 1 are allowed.
        warmup_steps: Updates of the warmup.

    Returns:
        The factor, in [floor_ratio, 1] after the warmup.
    """
    if step < warmup_steps:
        start = _shape(schedule, warmup_steps, total_steps, warmup_steps)
        return start * (step + 1) / warmup_steps
    return _shape(schedule, step, total_steps, warmup_steps)


def _shape(schedule: ScheduleConfig, step: int, total_steps: int, warmup_steps: int) -> float:
    """The factor after the warmup."""
    low = schedule.floor_ratio
    progress = _progress(step, warmup_steps, total_steps - 1)
    period = schedule.step_every or 1
    match schedule.kind:
        case ScheduleKind.constant:
            return 1.0
        case ScheduleKind.linear:
            return _between(low, 1 - progress)
        case ScheduleKind.cosine:
            return _between(low, (1 + cos(pi * progress)) / 2)
        case ScheduleKind.polynomial:
            return _between(low, (1 - progress) ** schedule.power)
        case ScheduleKind.exponential:
            return float(low**progress)
        case ScheduleKind.wsd:
            decay_steps = floor(schedule.decay_fraction * total_steps + 0.5)
            start = max(warmup_steps, total_steps - 1 - decay_steps)
            return _between(
                low, _decay(schedule.decay_shape, _progress(step, start, total_steps - 1))
            )
        case ScheduleKind.step:
            return max(low, schedule.step_factor ** ((step - warmup_steps) // period))
        case ScheduleKind.inverse_sqrt:
            return max(low, sqrt(max(warmup_steps, 1) / (step + 1)))
        case ScheduleKind.one_cycle:
            return _between(low, 1 - abs(2 * progress - 1))
        case ScheduleKind.cyclic:
            phase = (step - warmup_steps) % period / period
            return _between(low, 1 - abs(2 * phase - 1))


def _progress(step: int, start: int, last: int) -> float:
    """0 at `start`, 1 at `last` and after it; 0 when there is nothing in between."""
    return min(1.0, max(0.0, (step - start) / (last - start))) if last > start else 0.0


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
