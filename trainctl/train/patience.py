"""Early stopping: the run ends when the held-out loss has not become lower for a while."""

from __future__ import annotations

import math
from collections.abc import Mapping


class Patience:
    """Counts evaluations since the lowest held-out loss; a part of a checkpoint's manifest.

    Every rank has the same losses and so the same count.

    Args:
        limit: Evaluations in a row without a lower loss that end the run; None never does.
        state: Of a checkpoint, to go on from.
        min_delta: How much lower a loss has to be to count, in nats; it must be more than that.
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
        """Take note of an evaluation; one that is not a number is no improvement.

        Small steps add up: the loss to beat stays until one is low enough.
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
        """What a later attempt goes on from; empty before the first evaluation."""
        if math.isinf(self._best):
            return {}
        return {
            "best": self._best,
            "best_step": self._best_step,
            "evaluations_since": self._evaluations,
        }
