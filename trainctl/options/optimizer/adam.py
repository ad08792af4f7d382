"""Adam (arXiv:1412.6980): the weight decay is added to the gradient."""

from __future__ import annotations

from trainctl.options.optimizer import (
    ADAM,
    ELEMENT,
    EVERYWHERE,
    Maker,
    Optimizer,
    OptimizerForm,
    WidthRule,
    WithMoments,
)

SPEC = Optimizer(
    name="adam",
    keys=WithMoments,
    needs=ELEMENT,
    states=("exp_avg", "exp_avg_sq"),
    offload=EVERYWHERE,
    low_precision_states=True,
    made_by=Maker.torch,
    made_on_host_by=Maker.deepspeed,
    fused_by=Maker.torch,
    width_rule=WidthRule.adam,
    decays_gradient=True,
    deepspeed=OptimizerForm(
        type="Adam",
        parameters=ADAM,
        fixed={"adam_w_mode": (False, "optimizer.kind=adam: the decay is part of the gradient")},
        has_torch_adam=True,
        is_zero_tested=True,
    ),
)
