"""LAMB (arXiv:1904.00962): Adam with a trust ratio per layer, for very large batches."""

from __future__ import annotations

from trainctl.options.optimizer import (
    ADAM,
    NO_HOST_KERNEL,
    NO_SWAP,
    ROUNDED,
    Optimizer,
    OptimizerForm,
    Update,
    WithMoments,
)

SPEC = Optimizer(
    name="lamb",
    keys=WithMoments,
    build="trainctl.train.optimizers.lion_lamb:build_lamb",
    needs="the tensor",
    states=("exp_avg", "exp_avg_sq"),
    has_cpu_kernel=False,
    host_operator="",
    device_operator="fused_lamb",
    why_not={"cpu": NO_HOST_KERNEL, "nvme": NO_SWAP, "states": ROUNDED},
    # The step, made from the corrected first moment; norms are taken of fp64 copies.
    update=Update(moments=((8, 0), (4, 8)), by_tensor=True),
    all_reduces=1,
    deepspeed=OptimizerForm(type="Lamb", parameters=ADAM),
)
