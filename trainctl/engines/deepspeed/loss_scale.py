"""The loss scale of fp16, and the error when it cannot become smaller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase

from trainctl.config.schema import DataType
from trainctl.errors import ExitCode, TrainctlError

_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""State of a dynamic loss scale (deepspeed/runtime/fp16/loss_scaler.py)."""


class DeepSpeedLossScale:
    """DeepSpeed's loss scale, behind the trainer's `LossScale`."""

    def __init__(self, scaler: LossScalerBase) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, wrapper: Any, weights: DataType) -> DeepSpeedLossScale | None:
        """Return the loss scale of DeepSpeed's optimizer; None if the weights are not fp16."""
        return cls(wrapper.loss_scaler) if weights is DataType.fp16 else None

    @property
    def value(self) -> float:
        return float(self._scaler.cur_scale)

    def state(self) -> dict[str, float]:
        """Return the values that `restore` takes; empty for a fixed scale."""
        if not isinstance(self._scaler, DynamicLossScaler):
            return {}
        return {name: float(getattr(self._scaler, name)) for name in _COUNTERS}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue from a saved state. Nothing changes if the scale is fixed, or was when it was
        saved.
        """
        if isinstance(self._scaler, DynamicLossScaler) and state:
            # This launch may have a higher precision.min_loss_scale than the saved one.
            self._scaler.cur_scale = max(state["cur_scale"], float(self._scaler.min_scale))
            for name in _COUNTERS[1:]:
                setattr(self._scaler, name, int(state[name]))

    def is_smallest(self) -> bool:
        """Return True if the scale cannot become smaller: DeepSpeed raises at the next overflow."""
        scaler = self._scaler
        return isinstance(scaler, DynamicLossScaler) and scaler.cur_scale <= scaler.min_scale


@contextmanager
def stop_at_smallest(scale: DeepSpeedLossScale | None) -> Iterator[None]:
    """Turn DeepSpeed's exception for an exhausted loss scale, raised in an update, into a run's
    error.

    Raises:
        TrainctlError: The update overflowed at the smallest scale; on all ranks, because they share
            the overflow flag.
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
