"""What the gradient norm is clipped at: a number, or a limit that follows the norms of before.

``percentile`` is AutoClip (arXiv:2007.14469): the limit of a step is a percentile of all norms so
far, its own included. ``mean`` is a multiple of the mean of those before it. Both look back over
the last `gradients.adaptive_window` updates that were made: norms of what is clipped, after
elements and groups were. Either takes the place of `optimizer.gradient_clipping`, which holds only
where there is no norm yet to go by: for the first update of ``mean``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from trainctl.config.schema import AdaptiveClipping, GradientsConfig, RunConfig
from trainctl.engines.protocol import CLIPPING_EPSILON


def clipped_groups(norms: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """What the gradients of parameter groups above their own limits are multiplied by.

    Args:
        norms: Of each group; finite.
        limits: Of the groups that have one.
    """
    return {
        name: limit / (norms[name] + CLIPPING_EPSILON)
        for name, limit in limits.items()
        if norms[name] + CLIPPING_EPSILON > limit
    }


class NormHistory:
    """Norms of the last updates, and the limit that follows from them.

    Args:
        config: How.
        fixed: `optimizer.gradient_clipping`; 0 for none.
    """

    def __init__(self, config: GradientsConfig, fixed: float = 0.0) -> None:
        self._config, self._fixed = config, fixed or None
        self._norms: deque[float] = deque(maxlen=config.adaptive_window)

    @classmethod
    def of(cls, config: RunConfig) -> NormHistory:
        """That of a run, empty."""
        return cls(config.gradients, config.optimizer.gradient_clipping)

    @property
    def is_adaptive(self) -> bool:
        """Whether the limit is another one at each update."""
        return self._config.adaptive_clipping is not AdaptiveClipping.none

    def limit(self, norm: float | None) -> float | None:
        """Of a step with a gradient of that norm; None if nothing is clipped.

        Args:
            norm: None, or not finite, where there is none to follow.
        """
        if norm is None or not math.isfinite(norm):
            return self._fixed
        match self._config.adaptive_clipping:
            case AdaptiveClipping.percentile:
                norms = [*self._norms, norm][-self._config.adaptive_window :]
                return float(np.percentile(norms, self._config.adaptive_percentile))
            case AdaptiveClipping.mean if self._norms:
                return self._config.adaptive_factor * float(np.mean(self._norms))
            case _:
                return self._fixed

    def add(self, norm: float) -> None:
        """Note that an update was made."""
        if self.is_adaptive:
            self._norms.append(norm)

    def state(self) -> list[float]:
        """For the checkpoint: exact, so that a resume clips at the same limits."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Go on from a checkpoint."""
        self._norms.clear()
        self._norms.extend(norms)
