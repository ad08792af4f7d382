"""Early stopping: the run ends when the held-out loss has not improved for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping


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
