"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import OptimizerConfig
from trainctl.config.schema.option import option
from trainctl.options.optimizer import (
    ELEMENT,
    HOST,
    NO_SWAP,
    ROUNDED,
    Maker,
    Optimizer,
    OptimizerForm,
    OptimizerParameter,
    WidthRule,
    parameters,
)


@dataclass
class SgdConfig(OptimizerConfig):
    """Keys of SGD."""

    momentum: float = option(0.95, "Momentum coefficient.", minimum=0, maximum=0.999999)


SPEC = Optimizer(
    name="sgd",
    keys=SgdConfig,
    needs=ELEMENT,
    states=("momentum_buffer",),
    states_need="momentum",
    offload=HOST,
    why_not={"nvme": NO_SWAP, "states": ROUNDED},
    made_by=Maker.torch,
    fused_by=Maker.torch,
    host_operator="",
    width_rule=WidthRule.sgd,
    deepspeed=OptimizerForm(
        type="SGD",
        parameters=parameters(
            1e-3, OptimizerParameter(name="momentum", keys=("momentum",), default=0.0)
        ),
    ),
)
