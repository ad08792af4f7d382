"""Learning rate of a run: the schedule's closed form, changed by the run's own losses; and the
counter of evaluations that the schedule and early stopping wait by.

No torch. The held-out loss and every intervention are the same on all ranks, so all ranks compute
the same rate. The state kept here is in every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainctl.options.schedule import WithPatience
from trainctl.plans.schedule import Curve
from trainctl.plans.types import RunPlan


class LearningRate:
    """Factor of every group's peak learning rate at each update."""

    def __init__(self, plan: RunPlan) -> None:
        self._curve = Curve.of(plan)
        self._schedule = plan.config.schedule
        self._rewind_factor = plan.config.stability.rewind_lr_factor
        self._cut = 1.0
        self._drops = 0
        self._patience = self._patient({})

    def factor(self, step: int) -> float:
        """Return the factor at update number `step`, from 0."""
        return self._curve.factor(step, drops=self._drops) * self._cut

    @property
    def cut(self) -> float:
        """Factor left by the rewinds so far; 1 before any."""
        return self._cut

    def see(self, loss: float, step: int) -> dict[str, Any] | None:
        """Record a held-out loss.

        Args:
            loss: In nats, the same on all ranks.
            step: Number of updates before this loss.

        Returns:
            The fields of the record if the schedule drops the rate now: number of drops, new
            factor, and the patience state that caused the drop. None otherwise.
        """
        if self._patience is None:
            return None
        self._patience.see(loss, step)
        if not self._patience.is_exhausted:
            return None
        why = self._patience.state()
        self._drops += 1
        self._patience = self._patient({**why, "evaluations_since": 0} if why else {})
        return {"drops": self._drops, "factor": self.factor(step), **why}

    def cut_after_rewind(self) -> None:
        """Multiply the factor by `stability.rewind_lr_factor`, from now to the end of the run."""
        self._cut *= self._rewind_factor

    def state(self) -> dict[str, Any]:
        """Return the state for the checkpoint; empty while the schedule alone decides the rate."""
        if self._patience is None:
            return {"cut": self._cut} if self._cut != 1.0 else {}
        return {"cut": self._cut, "drops": self._drops, "patience": self._patience.state()}

    def restore(self, state: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Restore the state of a checkpoint, empty if the checkpoint has none.

        Args:
            rewound: Whether the running process rewinds: cuts by earlier rewinds then stay.
        """
        self._drops = int(state.get("drops", 0))
        self._patience = self._patient(state.get("patience", {}))
        if not rewound:
            self._cut = float(state.get("cut", 1.0))

    def _patient(self, state: Mapping[str, float]) -> Patience | None:
        schedule = self._schedule
        if not isinstance(schedule, WithPatience):
            return None
        return Patience(schedule.plateau_patience, state, min_delta=schedule.plateau_min_delta)


class Patience:
    """Counter of evaluations since the lowest held-out loss; part of a checkpoint's manifest.

    Every rank sees the same losses and so has the same count.

    Args:
        limit: Evaluations in a row without improvement that end the run; None never ends it.
        state: State of a checkpoint to start from.
        min_delta: Decrease of the loss, in nats, that an improvement must exceed.
    """

    def __init__(
        self,
        limit: int | None,
        state: Mapping[str, float] | None = None,
        *,
        min_delta: float = 0.0,
    ) -> None:
        found = state or {}
        self._limit, self._min_delta = limit, min_delta
        self._best = float(found.get("best", math.inf))
        self._best_step = int(found.get("best_step", 0))
        self._evaluations = int(found.get("evaluations_since", 0))

    def see(self, loss: float, step: int) -> None:
        """Record an evaluation; NaN is no improvement.

        The loss to beat changes only with an improvement, so that small decreases add up.
        """
        if loss < self._best - self._min_delta:
            self._best, self._best_step, self._evaluations = loss, step, 0
        else:
            self._evaluations += 1

    @property
    def is_exhausted(self) -> bool:
        """Whether the run should end now."""
        return self._limit is not None and self._evaluations >= self._limit

    def state(self) -> dict[str, float]:
        """Return the state for the manifest; empty before the first evaluation."""
        if math.isinf(self._best):
            return {}
        return {
            "best": self._best,
            "best_step": self._best_step,
            "evaluations_since": self._evaluations,
        }
