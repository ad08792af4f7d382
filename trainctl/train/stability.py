"""Checks of a step before its update, and limits on how often to intervene.

No torch: every number is already the sum over all ranks, so all ranks come to the same verdict.
docs/stability.md defines the means and counts after any sequence of steps, rewinds and resumes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from trainctl.config.schema import OnBadLoss, StabilityConfig


class BadStepKind(StrEnum):
    """Reason why a step is bad."""

    loss_not_finite = "loss_not_finite"
    norm_not_finite = "norm_not_finite"
    loss_spike = "loss_spike"
    norm_spike = "norm_spike"
    loss_limit = "loss_limit"
    norm_limit = "norm_limit"

    @property
    def is_finite(self) -> bool:
        return self not in (BadStepKind.loss_not_finite, BadStepKind.norm_not_finite)

    @property
    def quantity(self) -> str:
        """Quantity that is bad, in words."""
        return "loss" if self.value.startswith("loss") else "gradient norm"


@dataclass(frozen=True, slots=True)
class BadStep:
    """Verdict that a step should not be made."""

    kind: BadStepKind
    value: float
    """Loss or gradient norm of the step."""
    limit: float | None
    """Limit that the value exceeds; None if the value is not finite."""

    def of_step(self, step: int) -> str:
        """Return a clause such as ``the loss of step 7 is 21.5, above 8.2``."""
        above = "" if self.limit is None else f", above {self.limit:.4g}"
        return f"the {self.kind.quantity} of step {step} is {self.value:.6g}{above}"


@dataclass(slots=True)
class RunningMean:
    """Mean of the first `window` values, then an exponential moving average.

    The weight of a value then falls by 1 - 1 / `window` with each later value.
    """

    window: int
    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, self.window)


class StepGuard:
    """Judge of each step before its update, and counter of interventions.

    Args:
        config: Policy and limits.
        norm_may_overflow: Whether to leave a gradient norm that is not finite to the fp16 loss
            scale.
    """

    def __init__(self, config: StabilityConfig, *, norm_may_overflow: bool = False) -> None:
        self._config = config
        self._norm_may_overflow = norm_may_overflow
        self._loss = RunningMean(config.spike_window)
        self._norm = RunningMean(config.spike_window)
        self._in_a_row = 0
        self._bad_step = 0

    @property
    def interventions(self) -> int:
        """Number of interventions in a row."""
        return self._in_a_row

    def judge(self, loss: float, norm: float | None) -> BadStep | None:
        """Return what is wrong with a step; None if nothing is.

        Args:
            loss: Mean over the global batch, in nats.
            norm: Gradient norm; None if it is not known before the update.
        """
        if not math.isfinite(loss):
            return BadStep(BadStepKind.loss_not_finite, loss, None)
        if norm is not None and not math.isfinite(norm):
            return (
                None
                if self._norm_may_overflow
                else BadStep(BadStepKind.norm_not_finite, norm, None)
            )
        config = self._config
        spikes = (
            (BadStepKind.loss_limit, loss, config.loss_limit),
            (BadStepKind.loss_spike, loss, self._limit(self._loss, config.spike_factor)),
            (BadStepKind.norm_limit, norm, config.norm_limit),
            (BadStepKind.norm_spike, norm, self._limit(self._norm, config.norm_spike_factor)),
        )
        for kind, value, limit in spikes:
            if value is not None and limit is not None and value > limit:
                return BadStep(kind, value, limit)
        return None

    def policy(self, trouble: BadStep) -> OnBadLoss:
        """Return the policy to apply now: `stop` after too many interventions in a row.

        `warn` also becomes `stop` if the value is not finite.
        """
        policy = self._config.on_bad_loss
        if policy is OnBadLoss.warn:
            return policy if trouble.kind.is_finite else OnBadLoss.stop
        return policy if self._in_a_row < self._config.max_interventions else OnBadLoss.stop

    def intervene(self, step: int) -> None:
        """Count an intervention at step number `step`, from 1."""
        self._in_a_row += 1
        self._bad_step = max(self._bad_step, step)

    def accept(self, step: int, loss: float, norm: float | None) -> None:
        """Record a step whose update was made, spike or not.

        Interventions are no longer in a row once the last bad step is passed.
        """
        self._loss.add(loss)
        if norm is not None and math.isfinite(norm):
            self._norm.add(norm)
        if step >= self._bad_step:
            self._in_a_row = self._bad_step = 0

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint."""
        return {
            "loss": [self._loss.mean, self._loss.count],
            "norm": [self._norm.mean, self._norm.count],
            "in_a_row": self._in_a_row,
            "bad_step": self._bad_step,
        }

    def restore(self, state: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Restore the state of a checkpoint, empty if the checkpoint has none.

        Args:
            rewound: Whether the running process rewinds. The interventions in a row then stay
                counted, or they would never end.
        """
        for mean, name in ((self._loss, "loss"), (self._norm, "norm")):
            mean.mean, mean.count = state.get(name, (0.0, 0))
        if not rewound:
            self._in_a_row = int(state.get("in_a_row", 0))
            self._bad_step = int(state.get("bad_step", 0))

    def _limit(self, mean: RunningMean, factor: float | None) -> float | None:
        if factor is None or mean.count < self._config.spike_after_steps:
            return None
        return factor * mean.mean
