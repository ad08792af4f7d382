"""The loss scale of fp16, and what is said when it is used up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase

from trainctl.config.schema import DataType
from trainctl.errors import ExitCode, TrainctlError

_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic scale goes on from (deepspeed/runtime/fp16/loss_scaler.py)."""


class DeepSpeedLossScale:
    """The factor that keeps fp16 gradients from vanishing, as DeepSpeed has it.

    Args:
        scaler: DeepSpeed's.
    """

    def __init__(self, scaler: LossScalerBase) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, wrapper: Any, weights: DataType) -> DeepSpeedLossScale | None:
        """That of DeepSpeed's optimizer; None where the weights' format needs none."""
        return cls(wrapper.loss_scaler) if weights is DataType.fp16 else None

    @property
    def value(self) -> float:
        return float(self._scaler.cur_scale)

    def state(self) -> dict[str, float]:
        """What `restore` needs; empty for a fixed scale."""
        if not isinstance(self._scaler, DynamicLossScaler):
            return {}
        return {name: float(getattr(self._scaler, name)) for name in _COUNTERS}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a saved state; a scale that is fixed, or was when it was saved, does not."""
        if isinstance(self._scaler, DynamicLossScaler) and state:
            # A launch with another precision.min_loss_scale may have raised the floor.
            self._scaler.cur_scale = max(state["cur_scale"], float(self._scaler.min_scale))
            for name in _COUNTERS[1:]:
                setattr(self._scaler, name, int(state[name]))

    def is_smallest(self) -> bool:
        """Whether it cannot become smaller: DeepSpeed raises at the next overflow."""
        scaler = self._scaler
        return isinstance(scaler, DynamicLossScaler) and scaler.cur_scale <= scaler.min_scale


@contextmanager
def stop_at_smallest(scale: DeepSpeedLossScale | None) -> Iterator[None]:
    """Around an update: say in the run's words what DeepSpeed raises when the scale is used up.

    Raises:
        TrainctlError: The update overflowed at the smallest scale; on all ranks, which share the
            verdict.
    """
    try:
        yield
    except Exception as error:
        if scale is None or not scale.is_smallest():
            raise
        raise TrainctlError(
            f"the gradients overflow fp16 even at the smallest loss scale, {scale.value:g}",
            hint="the run diverges: a lower optimizer.lr, or precision=bf16",
            exit_code=ExitCode.training_failed,
        ) from error
