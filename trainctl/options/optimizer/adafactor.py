"""Adafactor (arXiv:1804.04235): second moments by row and column, no first moment."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import OptimizerConfig
from trainctl.config.schema.option import option
from trainctl.options.optimizer import (
    NO_HOST_KERNEL,
    NO_SWAP,
    Optimizer,
    OptimizerForm,
    Update,
    parameters,
)


@dataclass
class AdafactorConfig(OptimizerConfig):
    """Keys of Adafactor."""

    epsilon: float = option(1e-8, "Lower bound of the second moment.", above=0)


SPEC = Optimizer(
    name="adafactor",
    keys=AdafactorConfig,
    build="trainctl.train.optimizers.adafactor:build",
    needs="the matrix",
    states=(),
    has_factored_states=True,
    why_not={
        "cpu": NO_HOST_KERNEL,
        "nvme": NO_SWAP,
        "states": "its states are rows and columns, in fp32",
    },
    # The step, a parameter's second moment, and two fp64 copies of its step for the norm.
    update=Update(moments=((4, 20),), by_tensor=True),
    all_reduces=3,  # of the weights' squares, the rows and columns, the step's squares
    deepspeed=OptimizerForm(type="Adafactor", parameters=parameters(1e-2)),
)
