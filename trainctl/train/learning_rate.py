"""What the run's own losses do to the learning rate, over the schedule's closed form of the step.

No torch: the held-out loss and every intervention are the same on all ranks, so all ranks come to
the same rate. What is kept here is in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.options.schedule import WithPatience
from trainctl.plan.schedule import Curve
from trainctl.plan.types import RunPlan
from trainctl.train.patience import Patience


class LearningRate:
    """The factor of every group's peak learning rate, by the update.

    Args:
        plan: Of the run.
    """

    def __init__(self, plan: RunPlan) -> None:
        self._curve = Curve.of(plan)
        self._schedule = plan.config.schedule
        self._rewind_factor = plan.config.stability.rewind_lr_factor
        self._cut = 1.0
        self._drops = 0
        self._patience = self._patient({})

    def factor(self, step: int) -> float:
        """Of update number `step`, from 0."""
        return self._curve.factor(step, drops=self._drops) * self._cut

    @property
    def cut(self) -> float:
        """What the rewinds so far have left of it."""
        return self._cut

    def see(self, loss: float, step: int) -> dict[str, Any] | None:
        """Take note of a held-out loss.

        Args:
            loss: In nats, the same on all ranks.
            step: Updates that were made before it.

        Returns:
            For the record, if the schedule lets the rate drop now: how often it has, why and to
            what.
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
        """Multiply it by `stability.rewind_lr_factor`, from now to the end of the run."""
        self._cut *= self._rewind_factor

    def state(self) -> dict[str, Any]:
        """For the checkpoint; empty while there is nothing but the schedule."""
        if self._patience is None:
            return {"cut": self._cut} if self._cut != 1.0 else {}
        return {"cut": self._cut, "drops": self._drops, "patience": self._patience.state()}

    def restore(self, state: Mapping[str, Any], *, rewound: bool = False) -> None:
        """Go on from a checkpoint; empty for one that knows nothing of it.

        Args:
            rewound: In the running process: what earlier rewinds have cut stays cut.
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
