"""Clipping threshold of the gradient norm: constant, or adaptive to the norms of earlier updates.

``percentile`` is AutoClip (arXiv:2007.14469): the threshold of a step is a percentile of all norms
so far, including the step's own. ``mean`` is a multiple of the mean of the earlier norms. Both look
back over the last `gradients.adaptive_window` updates that were made. The norms are taken after
changes to elements and groups, right before clipping. Both replace `optimizer.gradient_clipping`,
which applies only where there is no norm to follow, as at the first update of ``mean``.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from trainctl.config.schema import AdaptiveClipping, GradientsConfig, RunConfig
from trainctl.engines.protocol import CLIPPING_EPSILON


def clipped_groups(norms: Mapping[str, float], limits: Mapping[str, float]) -> dict[str, float]:
    """Return factors that scale down the gradients of parameter groups above their own limits.

    Args:
        norms: Gradient norm of each group; finite.
        limits: Limits of the groups that have their own.
    """
    return {
        name: limit / (norms[name] + CLIPPING_EPSILON)
        for name, limit in limits.items()
        if norms[name] + CLIPPING_EPSILON > limit
    }


class NormHistory:
    """Gradient norms of the last updates, and the clipping threshold that follows from them.

    Args:
        config: Kind and window of adaptive clipping.
        fixed: `optimizer.gradient_clipping`; 0 for none.
    """

    def __init__(self, config: GradientsConfig, fixed: float = 0.0) -> None:
        self._config, self._fixed = config, fixed or None
        self._norms: deque[float] = deque(maxlen=config.adaptive_window)

    @classmethod
    def of(cls, config: RunConfig) -> NormHistory:
        """Return an empty history with a run's settings."""
        return cls(config.gradients, config.optimizer.gradient_clipping)

    @property
    def is_adaptive(self) -> bool:
        """Whether the threshold follows earlier norms."""
        return self._config.adaptive_clipping is not AdaptiveClipping.none

    def limit(self, norm: float | None) -> float | None:
        """Return the threshold of a step with this gradient norm; None if nothing is clipped.

        Args:
            norm: Norm right before clipping. None, or not finite, gives the fixed threshold.
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
        """Record the norm of an update that was made."""
        if self.is_adaptive:
            self._norms.append(norm)

    def state(self) -> list[float]:
        """Return the norms for the checkpoint, exact: a resume clips at the same thresholds."""
        return list(self._norms)

    def restore(self, norms: Sequence[float]) -> None:
        """Replace the history by a checkpoint's norms."""
        self._norms.clear()
        self._norms.extend(norms)
