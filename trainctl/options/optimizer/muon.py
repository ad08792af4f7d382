"""Muon (kellerjordan.github.io/posts/muon): orthogonalised momentum for the blocks' matrices.

Embeddings, norms and the output projection use AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.optimizer import (
    NO_SWAP,
    ROUNDED,
    Maker,
    Optimizer,
    OptimizerForm,
    OptimizerParameter,
    Update,
    WidthRule,
    WithMoments,
    betas_parameter,
    eps_parameter,
    parameters,
)


@dataclass
class MuonConfig(WithMoments):
    """Keys of Muon."""

    momentum: float = option(0.95, "Momentum of the matrices.", minimum=0, maximum=0.999999)
    matrix_lr: float | None = option(
        None, "Peak learning rate of the matrices; none means lr.", above=0
    )


SPEC = Optimizer(
    name="muon",
    keys=MuonConfig,
    build="trainctl.train.optimizers.muon:build",
    needs="the matrix",
    states=("exp_avg", "exp_avg_sq"),
    matrix_states=("momentum_buffer",),
    matrix_lr="matrix_lr",
    fused_by=Maker.torch,
    why_not={
        "cpu": "whole matrices are orthogonalised on the device",
        "nvme": NO_SWAP,
        "states": ROUNDED,
    },
    # Directions in fp32. For one matrix also five 16-bit copies: the iterate, the next iterate, the
    # previous step, the Gram matrix, and its polynomial.
    matrix_update=Update(moments=((4, 10),), whole_tensors=True, by_tensor=True),
    width_rule=WidthRule.spectral,
    deepspeed=OptimizerForm(
        type="Muon",
        parameters=parameters(
            0.02,
            betas_parameter(0.9, 0.95),
            eps_parameter(1e-10),
            OptimizerParameter(name="momentum", keys=("momentum",), default=0.95),
            OptimizerParameter(name="muon_lr", keys=("matrix_lr",), is_rate=True, or_lr=True),
        ),
        has_torch_adam=True,
        is_zero_tested=True,
    ),
)
