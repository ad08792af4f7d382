"""Limits of the gradient norm that follow the norms of before.

``percentile`` is AutoClip (arXiv:2007.14469): the limit of a step is a percentile of all norms so
far, its own included. ``mean`` is a multiple of the mean of those before it. Both look back over
the last `gradients.adaptive_window` updates that were made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from trainctl.config.schema import AdaptiveClipping, GradientsConfig


class NormHistory:
    """Norms of the last updates, and the limit that follows from them.

    Args:
        config: How.
    """

    def __init__(self, config: GradientsConfig) -> None:
        self._config = config
        self._norms: deque[float] = deque(maxlen=config.adaptive_window)

    def limit(self, norm: float) -> float | None:
        """Of a step with a gradient of that norm, which must be finite; None if it has none."""
        match self._config.adaptive_clipping:
            case AdaptiveClipping.percentile:
                norms = [*self._norms, norm][-self._config.adaptive_window :]
                return float(np.percentile(norms, self._config.adaptive_percentile))
            case AdaptiveClipping.mean if self._norms:
                return self._config.adaptive_factor * float(np.mean(self._norms))
            case _:
                return None

    def add(self, norm: float) -> None:
        """Note that an update was made."""
        if self._config.adaptive_clipping is not AdaptiveClipping.none:
            self._norms.append(norm)

    def state(self) -> list[float]:
        """For the checkpoint: exact, so that a resume clips at the same limits."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Go on from a checkpoint."""
        self._norms.clear()
        self._norms.extend(norms)
