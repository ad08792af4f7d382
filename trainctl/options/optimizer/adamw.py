"""AdamW (arXiv:1711.05101): Adam with decoupled weight decay."""

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
    name="adamw",
    keys=WithMoments,
    needs=ELEMENT,
    states=("exp_avg", "exp_avg_sq"),
    offload=EVERYWHERE,
    offload_variants=("ratio", "zenflow", "super_offload"),
    low_precision_states=True,
    made_by=Maker.torch,
    made_on_host_by=Maker.deepspeed,
    fused_by=Maker.torch,
    width_rule=WidthRule.adam,
    deepspeed=OptimizerForm(
        type="AdamW", also=("adam",), parameters=ADAM, has_torch_adam=True, is_zero_tested=True
    ),
)
