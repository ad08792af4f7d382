"""Lion (arXiv:2302.06675): the sign of a momentum, so one state per parameter."""

from __future__ import annotations

from trainctl.options.optimizer import (
    ELEMENT,
    HOST,
    NO_SWAP,
    ROUNDED,
    Maker,
    Optimizer,
    OptimizerForm,
    Update,
    WidthRule,
    WithBetas,
    betas_parameter,
    parameters,
)

SPEC = Optimizer(
    name="lion",
    keys=WithBetas,
    build="trainctl.train.optimizers.lion_lamb:build_lion",
    needs=ELEMENT,
    states=("exp_avg",),
    offload=HOST,
    why_not={"nvme": NO_SWAP, "states": ROUNDED},
    made_on_host_by=Maker.deepspeed,
    fused_by=Maker.deepspeed,
    is_ours_because="DeepSpeed's kernels are for GPUs and for states in host memory",
    host_operator="cpu_lion",
    device_operator="fused_lion",
    update=Update(moments=((4, 0),), by_tensor=True),  # the update, in fp32
    width_rule=WidthRule.adam,
    deepspeed=OptimizerForm(
        type="Lion", parameters=parameters(1e-4, betas_parameter(0.9, 0.99)), is_zero_tested=True
    ),
)
