"""Number formats on a rank: fp8 matrix products, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScalerBase
from transformers.modeling_utils import PreTrainedModel

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.train.model import blocks

_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""What a dynamic scale goes on from (deepspeed/runtime/fp16/loss_scaler.py)."""


def convert_to_fp8(model: PreTrainedModel, precision: PrecisionConfig) -> int:
    """Let the linear layers of the decoder blocks multiply in fp8; how many do.

    Inputs, weights and gradients are rounded with a scale for each tensor, computed when they are
    used (torchao's dynamic scaling, arXiv:2209.05433). Weights stay in bf16 under their names, so
    ZeRO, checkpoints and exports see no difference. Embeddings, norms and the output projection
    are left alone: the last one decides the loss.

    Args:
        model: May still be a skeleton.
        precision: Of the plan; nothing is converted unless it computes in fp8.

    Raises:
        TrainctlError: torchao is missing, or no layer can be converted.
    """
    if precision.compute is not DataType.fp8:
        return 0
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise TrainctlError(
            f"precision.compute=fp8 needs the package torchao ({error})",
            hint="pip install 'trainctl[fp8]', or precision=bf16",
            exit_code=ExitCode.environment,
        ) from None
    config = Float8LinearConfig(emulate=precision.emulate_fp8)
    layers = blocks(model)
    for layer in layers:
        convert_to_float8_training(layer, config=config)
    converted = sum(isinstance(module, Float8Linear) for module in model.modules())
    if converted == 0:
        raise TrainctlError(
            f"precision.compute=fp8, but none of the {len(layers)} blocks of "
            f"{type(model).__name__} has a linear layer",
            hint="precision=bf16",
        )
    return converted


class LossScale:
    """The factor that keeps fp16 gradients from vanishing (arXiv:1710.03740), as DeepSpeed has it.

    After an update that overflowed, the scale is halved (from the second one in a row on), and
    doubled after a number of updates without. It decides which updates are made, so it belongs to
    the state of a run.
    """

    def __init__(self, scaler: LossScalerBase) -> None:
        self._scaler = scaler

    @classmethod
    def of(cls, wrapper: Any, weights: DataType) -> LossScale | None:
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

    def restore(self, state: dict[str, float]) -> None:
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
def stop_at_smallest(scale: LossScale | None) -> Iterator[None]:
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


def share_groups(wrapper: Any) -> None:
    """Let the device's part of a partly offloaded optimizer follow the groups of the host's part.

    DeepSpeed does so for every group but the first, whose learning rate would stay what it was at
    the start (zero/stage3.py, `backup_optimizer`).
    """
    backup = getattr(wrapper, "backup_optimizer", None)
    if backup is not None:
        backup.param_groups.clear()
        for group in wrapper.optimizer.param_groups:
            backup.add_param_group(group)
